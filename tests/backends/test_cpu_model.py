"""Whole models on the cpu backend: the reference's numbers, and the same bits however a request is computed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import Batch, Ends
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.cpu.record import Recorder
from tailrace.backends.reference import ReferenceBackend
from tailrace.models import load_model, open_checkpoint
from tests.batches import batch, logits_of, pages_for
from tests.models import random_llama

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
LOGITS = np.load(GOLDEN / "logits.npz")
NAMES = sorted(name for name in LOGITS.files if not name.startswith("rope-"))
KERNELS = available_kernels()


def on_cpu(name: str, length: int, *, kernels: str | None = None, threads: int = 2, step: int = 256) -> CpuBackend:
    model = load_model(open_checkpoint(GOLDEN / "models" / name), max_context=length)
    return CpuBackend(
        model,
        pages=4 * pages_for(length) + 8,
        max_context=length,
        step_tokens=step,
        max_running=8,
        threads=threads,
        kernels=kernels,
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_gives_the_logits_of_the_reference(name: str, kernels: str) -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / name), max_context=80)
    truth = logits_of(ReferenceBackend(model, pages=8, kv_dtype="bf16"), PROMPT[:80], range(80))
    found = logits_of(on_cpu(name, 80, kernels=kernels), PROMPT[:80], range(80))
    # a key or value that lies between two bf16 numbers may round either way after float32 rounding
    assert np.abs(found - truth).max() < 2e-3 * np.abs(truth).max()
    assert np.median(np.abs(found - truth)) < 1e-5 * np.abs(truth).max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_pages_threads_and_company_do_not_change_a_bit(name: str, kernels: str) -> None:
    prompt = PROMPT[:80]
    backend = on_cpu(name, 80, kernels=kernels)
    truth = logits_of(backend, prompt, range(80))
    for chunk in (1, 7, 16, 64):
        assert np.array_equal(logits_of(backend, prompt, range(80), chunk=chunk, first_page=5), truth)
    assert np.array_equal(logits_of(on_cpu(name, 80, kernels=kernels, threads=1), prompt, range(80), chunk=11), truth)
    other = PROMPT[100:150]
    together = backend.run(batch([(other, 0, [10, 11, 12, 13]), (prompt, 0, [3, 1, 4, 2, 0])], range(50, 130))).logits
    assert np.array_equal(together, truth)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_long_context_has_the_same_bits_decoded_by_pieces(name: str) -> None:
    """One sequence that decodes alone is cut over its KV among the threads; a chunk of queries is not."""
    length = 700
    backend = on_cpu(name, length, step=length)
    truth = logits_of(backend, PROMPT[:length], range(length))
    table = list(range(pages_for(length)))
    for position in (699, 500, 128, 127, 65, 64, 63):  # downwards: the last row of a sequence clears its page behind it
        alone = backend.run(batch([([PROMPT[position]], position, table)], [0])).logits
        assert np.array_equal(alone[0], truth[position])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_shared_pages_give_the_same_bits(name: str) -> None:
    backend = on_cpu(name, 80)
    truth = logits_of(backend, PROMPT[:80], [79])
    logits_of(backend, PROMPT[:48], [47], first_page=10)
    found = backend.run(batch([(PROMPT[48:80], 48, [10, 11, 12, 20, 21])], [31])).logits
    assert np.array_equal(found, truth)


def test_repacked_weights_are_kept_and_mapped(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / "llama"), max_context=64)
    sizes = {"pages": 8, "max_context": 64, "step_tokens": 64, "max_running": 2}
    first = CpuBackend(model, cache_dir=tmp_path, **sizes)
    second = CpuBackend(model, cache_dir=tmp_path, **sizes)
    assert first.mapped
    assert second.mapped
    truth = logits_of(first, PROMPT[:40], [39])
    assert np.array_equal(logits_of(second, PROMPT[:40], [39]), truth)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])  # a torn file is packed anew
    assert np.array_equal(logits_of(CpuBackend(model, cache_dir=tmp_path, **sizes), PROMPT[:40], [39]), truth)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / "llama"), max_context=64)
    blocked = tmp_path / "file"
    blocked.write_text("")
    backend = CpuBackend(model, pages=8, max_context=64, step_tokens=64, max_running=2, cache_dir=blocked)
    assert not backend.mapped
    assert "not kept" in caplog.text
    assert logits_of(backend, PROMPT[:8], [7]).shape == (1, model.vocab)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([1, 9999], np.int32)},
        {"tokens": np.array([1, -1], np.int32)},
        {"tables": np.array([[9999]], np.int32)},
        {"tables": np.array([[-1]], np.int32)},
        {"context": np.array([-1], np.int32)},
        {"context": np.array([5000], np.int32)},
        {"wanted": np.array([5], np.int32)},
        {"starts": np.array([0, 5], np.int32)},
    ],
    ids=str,
)
def test_a_batch_that_points_outside_is_refused(change: dict[str, np.ndarray]) -> None:
    backend = on_cpu("llama", 64)
    step = batch([([1, 2], 0, [0])], [1])
    for name, value in change.items():
        setattr(step, name, value)
    with pytest.raises(ValueError, match=r"\w"):
        backend.run(step)
    assert backend.run(batch([([1, 2], 0, [0])], [1])).tokens.shape == (1,)


def test_an_unknown_kernel_build_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="'sse9' cannot run on this machine; it can run"):
        on_cpu("llama", 64, kernels="sse9")


def test_what_follows_the_last_attention_is_computed_for_wanted_rows_only() -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / "llama"), max_context=64)
    recorder = Recorder()
    model.forward(recorder)
    names = [node.op for node in recorder.nodes]
    last = len(names) - 1 - names[::-1].index("attention")
    assert names[last + 1 : last + 3] == ["wanted", "wanted"]  # the residual stream and what was attended
    assert names.count("wanted") == 2
    assert names.count("silu_mul") == len(model.layers)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_chained_step_of_another_shape_is_not_taken_for_the_one_before(tmp_path: Path, threads: int) -> None:
    """The step has ended before it is told what follows, and what follows needs more attention tasks: whoever then
    waits for the step that has ended must not walk the list of the one that runs."""
    length = 383  # the next token begins a piece of keys
    shape = {"LAYERS": 24, "HEADS": 4, "KV_HEADS": 4, "HIDDEN": 256, "INNER": 256, "HEAD_DIM": 64}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shape.items():
            patch.setattr(random_llama, name, value)
        path = random_llama.write(tmp_path / "model")
    model = load_model(open_checkpoint(path), max_context=512)
    backend = CpuBackend(model, pages=40, max_context=512, step_tokens=256, max_running=8, threads=threads)
    table, prompt = list(range(32)), [(at * 7 + 3) % 180 for at in range(length)]

    def decode(token: int, position: int) -> Batch:
        return batch([([token], position, table)], [0], logits=False, logprobs=0)

    for begin in (0, 256):
        part = prompt[begin : begin + 256]
        first = int(backend.run(batch([(part, begin, table)], [len(part) - 1], logits=False)).tokens[0])
    second = int(backend.run(decode(first, length)).tokens[0])
    truth = backend.run(decode(second, length + 1))
    nothing = Ends(np.zeros(2, np.int32), np.zeros(0, np.int32))
    for _ in range(60):
        backend.launch(decode(first, length))
        time.sleep(0.01)
        backend.chain(decode(0, length + 1), nothing)
        assert backend.wait().tokens[0] == second
        assert backend.chained
        found = backend.wait()
        assert (found.tokens[0], found.logprobs[0]) == (truth.tokens[0], truth.logprobs[0])


def test_more_threads_than_cores_do_not_change_a_bit() -> None:
    """Threads lose their cores in the middle of tasks, which others then compute again."""
    few, many = on_cpu("llama", 200, threads=1), on_cpu("llama", 200, threads=3 * len(os.sched_getaffinity(0)))
    tables = [list(range(13 * at, 13 * at + 13)) for at in range(3)]
    for step in range(150):
        shapes = [(PROMPT[:9], 0), (PROMPT[10:11], 9), (PROMPT[20:23], 10)] if step % 3 else [(PROMPT[:40], 0)]
        parts = [(tokens, context, tables[at]) for at, (tokens, context) in enumerate(shapes)]
        wanted = [sum(len(tokens) for tokens, _ in shapes) - 1]
        assert np.array_equal(many.run(batch(parts, wanted)).logits, few.run(batch(parts, wanted)).logits), step


def test_chained_steps_draw_what_launched_ones_do_and_stop_where_they_are_told_to() -> None:
    length = 120
    backend = on_cpu("llama", length)
    tables = [list(range(8)), list(range(8, 16))]

    def decode(tokens: list[int], position: int) -> Batch:
        parts = [([token], position, table) for token, table in zip(tokens, tables, strict=True)]
        return batch(parts, [0, 1], logits=False)

    def prompts() -> list[int]:
        parts = [(PROMPT[at : at + 20], 0, table) for at, table in zip((0, 50), tables, strict=True)]
        return backend.run(batch(parts, [19, 39], logits=False)).tokens.tolist()

    drawn = [prompts()]
    for position in range(20, length):
        drawn.append(backend.run(decode(drawn[-1], position)).tokens.tolist())
    end = drawn[60][1]  # of the second row alone, and not before step 40
    last = next(at for at in range(40, len(drawn)) if drawn[at][1] == end)
    nothing, something = (
        Ends(np.zeros(3, np.int32), np.zeros(0, np.int32)),
        Ends(np.array([0, 0, 1], np.int32), np.array([end], np.int32)),
    )
    backend.launch(decode(prompts(), 20))
    for at in range(1, len(drawn)):
        backend.chain(decode([0, 0], 20 + at), something if at >= 40 else nothing)
        assert backend.wait().tokens.tolist() == drawn[at]
        if not backend.chained:
            break
    assert at == last

    backend.launch(decode(drawn[0], 20))
    backend.hold(True)
    backend.chain(decode([0, 0], 21), nothing)
    assert backend.wait().tokens.tolist() == drawn[1]
    assert not backend.chained
    with pytest.raises(ValueError, match="no step"):
        backend.wait()
