"""Where a model's description comes from: folders, headers, a hub that is asked for pieces of files only."""

from __future__ import annotations

import http.server
import json
import struct
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf as reference
import pytest

from tailrace.models.files.gguf import TYPES
from tailrace.terms import ModelError
from tailrace.twin.shapes import gguf
from tailrace.twin.shapes.hub import Repository, repository
from tailrace.twin.shapes.sources import describe
from tests.models.gguf_bytes import GgufBytes
from tests.models.gguf_bytes import Tensor as GgufTensor
from tests.twin.models import MISTRAL_7B, TINYLLAMA

SMALL = {
    **MISTRAL_7B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
    "max_position_embeddings": 256,
}


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model, by the names of checkpoints."""
    hidden, inner, heads, kv = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    narrow = hidden // heads * kv
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        made |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return made | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def _header(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A safetensors file without its data, which no sizing reads."""
    entries, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


def _folder(path: Path, config: dict[str, Any], files: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = _tensors(config)
    if files == 1:
        (path / "model.safetensors").write_bytes(_header(tensors))
        return path
    names = sorted(tensors)
    shards = {f"model-{n + 1:05}-of-{files:05}.safetensors": names[n::files] for n in range(files)}
    for shard, held in shards.items():
        (path / shard).write_bytes(_header({name: tensors[name] for name in held}))
    total = 2 * sum(prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: s for s, held in shards.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_headers_of_a_folder_say_what_the_configuration_says(tmp_path: Path) -> None:
    found = describe(str(_folder(tmp_path / "one", SMALL)))
    assert found.stored is not None
    assert found.stored.values == found.shape.parameters
    assert found.stored.bytes == found.weights.bytes == found.stored.by_type["BF16"]
    parts = describe(str(_folder(tmp_path / "three", SMALL, files=3)))
    assert parts.stored is not None
    assert (parts.stored.bytes, parts.stored.files) == (found.stored.bytes, 3)


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINYLLAMA))
    found = describe(str(file))
    assert found.stored is None
    assert found.shape.name == "tiny"
    assert found.weights.bytes == 2 * 1_100_048_384


def test_modelopts_own_file_says_how_weights_are_stored(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", SMALL)
    said = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert "fp8-tensor" in describe(str(folder)).weights.by_format


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"\xff" * 16, "no safetensors file"),
        ("model.safetensors", struct.pack("<Q", 500) + b"{", "ends inside its header"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
        ("model.safetensors", _header({"x": (2, 3)}).replace(b"BF16", b"BF61"), "unknown type 'BF61'"),
        ("model.safetensors", _header({"x": (2, 3)}).replace(b"[2, 3]", b"[2,-3]"), "impossible shape"),
        ("model.safetensors.index.json", b"{}", "there is no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "gone.safetensors"}}', "the index names it"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"x": "../other.safetensors"}}',
            "is no name of a file beside it",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "config.json"}}', "is no name of a file beside it"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"{}", "model_type is missing"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = _folder(tmp_path / "m", SMALL)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        describe(str(folder))
    assert "m" in str(caught.value)


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a config\.json"):
        describe(str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"there is no config\.json and no \.gguf file"):
        describe(str(tmp_path))


# A hub


class Hub(http.server.ThreadingHTTPServer):
    """Serves a folder as a hub does: OWNER/NAME/resolve/main/FILE, ranges of it, and a redirect if told to."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges, self.redirect = folder, True, ""
        self.asked: list[tuple[str, str, str]] = []
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        hub.asked.append((self.path, self.headers.get("Range", ""), self.headers.get("Authorization", "")))
        if hub.redirect and "resolve" in self.path:
            self.send_response(302)
            self.send_header("Location", hub.redirect + self.path.replace("/resolve/main", "/cdn"))
            self.end_headers()
            return
        file = hub.folder / self.path.rpartition("/")[2]
        if "private" in self.path or not file.is_file():
            self.send_error(401 if "private" in self.path else 404)
            return
        whole = file.read_bytes()
        begin, end = (int(one) for one in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = whole[begin : end + 1] if hub.ranges else whole
        hub.sent += len(part)
        self.send_response(206 if hub.ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[list[Hub]]:
    made = [Hub(tmp_path / "m"), Hub(tmp_path / "m")]
    threads = [threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True) for hub in made]
    for thread in threads:
        thread.start()
    yield made
    for hub in made:
        hub.shutdown()
        hub.server_close()


def test_a_hub_is_asked_for_headers_and_never_for_weights(hubs: list[Hub], tmp_path: Path) -> None:
    hub = hubs[0]
    folder = _folder(tmp_path / "m", SMALL, files=3)
    for shard in folder.glob("*.safetensors"):
        with shard.open("ab") as file:
            file.truncate(shard.stat().st_size + (4 << 20))  # weights, which are a hole
    found = describe(f"{hub.address}/owner/name")
    assert found.stored is not None
    assert (found.stored.bytes, found.stored.whole) == (found.weights.bytes, False)
    assert not any(path.endswith(".safetensors") for path, _, _ in hub.asked)
    by_header = describe(f"{hub.address}/owner/name", headers=True)
    assert by_header.stored is not None
    assert (by_header.stored.values, by_header.stored.whole) == (found.shape.parameters, True)
    assert hub.sent < 2 << 20


def test_a_header_that_is_longer_than_the_first_piece_is_read_on(hubs: list[Hub], tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", SMALL)
    raw = _header(_tensors(SMALL))[8:-1] + b" " * (300 << 10) + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    found = describe(f"{hubs[0].address}/owner/name")
    assert found.stored is not None
    assert found.stored.values == found.shape.parameters
    hubs[0].ranges = False
    with pytest.raises(ModelError, match="whole files only"):
        describe(f"{hubs[0].address}/owner/name")


def test_a_token_stays_with_the_hub(hubs: list[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path / "m", SMALL)
    hub, elsewhere = hubs
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.address}/")
    hub.redirect = elsewhere.address
    describe("owner/name")
    assert all(token == "Bearer secret" for _, _, token in hub.asked)
    assert elsewhere.asked
    describe(f"{elsewhere.address}/owner/name")  # which is not the configured one
    assert all(token == "" and wanted for _, wanted, token in elsewhere.asked)


def test_what_the_hub_refuses_is_said_in_a_sentence(hubs: list[Hub], tmp_path: Path) -> None:
    _folder(tmp_path / "m", SMALL)
    with pytest.raises(ModelError, match=r"wants to know who asks \(401\): set HF_TOKEN"):
        describe(f"{hubs[0].address}/owner/private")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        describe(f"{hubs[0].address}/owner/name")
    with pytest.raises(ModelError, match="cannot be read"):
        describe("http://127.0.0.1:9/owner/name")


def test_names_and_addresses_mean_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert repository("Qwen/Qwen3-8B") == Repository("Qwen/Qwen3-8B", "https://huggingface.co")
    assert repository("https://h.example/a/b/tree/v2") == Repository("a/b", "https://h.example", "v2")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    assert repository("Qwen/Qwen3-8B") == Repository("Qwen/Qwen3-8B", "http://mirror")
    assert repository("plain") is None
    assert repository("ftp://h/a/b") is None
    with pytest.raises(ModelError, match="expected an address"):
        repository("https://h.example/only-one")


# GGUF


def test_types_have_the_sizes_that_the_format_has() -> None:
    sizes = {kind.name: size for kind, size in reference.GGML_QUANT_SIZES.items()}
    ours = {name: gguf.BLOCKS[name] for name in sizes if name != "Q8_1"}  # which is an activation's, and was changed
    assert ours == {name: size for name, size in sizes.items() if name in ours}


def _gguf(path: Path, *, moe: bool = False, kind: str = "IQ4_XS") -> Path:
    """A file whose matrices are stored in a type that our engine does not compute with."""
    hidden, inner, heads, kv, vocab, layers = 256, 512, 8, 2, 300, 2
    number = TYPES.index(kind)
    values, size = gguf.BLOCKS[kind]

    def matrix(*shape: int) -> GgufTensor:
        count = prod(shape)
        return GgufTensor(shape, bytes(count // values * size), number)

    arch = "qwen3moe" if moe else "llama"
    file = GgufBytes(
        metadata=[
            ("general.architecture", arch),
            (f"{arch}.block_count", layers),
            (f"{arch}.embedding_length", hidden),
            (f"{arch}.attention.head_count", heads),
            (f"{arch}.attention.head_count_kv", kv),
            (f"{arch}.context_length", 1024),
            (f"{arch}.feed_forward_length", inner),
            (f"{arch}.rope.freq_base", 10000.0),
            (f"{arch}.attention.key_length", 32),
            (f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
            ("tokenizer.ggml.tokens", ["a", "b"]),
            *(
                [
                    (f"{arch}.expert_count", 4),
                    (f"{arch}.expert_used_count", 2),
                    (f"{arch}.expert_feed_forward_length", 256),
                ]
                * moe
            ),
        ]
    )
    file.tensors += [
        ("token_embd.weight", matrix(vocab, hidden)),
        ("output_norm.weight", GgufTensor((hidden,), bytes(4 * hidden))),
    ]
    for layer in range(layers):
        parts = {
            "attn_q": (hidden, hidden),
            "attn_k": (64, hidden),
            "attn_v": (64, hidden),
            "attn_output": (hidden, hidden),
        }
        if moe:
            parts |= {
                "ffn_gate_exps": (4, 256, hidden),
                "ffn_up_exps": (4, 256, hidden),
                "ffn_down_exps": (4, hidden, 256),
            }
        else:
            parts |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        file.tensors += [(f"blk.{layer}.{name}.weight", matrix(*shape)) for name, shape in parts.items()]
        plain = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        if moe:
            plain |= {"attn_q_norm": (32,), "attn_k_norm": (32,), "ffn_gate_inp": (4, hidden)}
        file.tensors += [
            (f"blk.{layer}.{name}.weight", GgufTensor(shape, bytes(4 * prod(shape)))) for name, shape in plain.items()
        ]
    return file.write(path)


def test_a_gguf_file_on_a_hub_is_read_as_far_as_its_header_goes(
    hubs: list[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    local = describe(str(_gguf(tmp_path / "m" / "x.gguf")))
    monkeypatch.setattr(gguf, "FIRST", 256)  # so that the header does not fit into the first piece
    found = describe(f"{hubs[0].address}/owner/name/resolve/main/x.gguf")
    assert found.weights.bytes == local.weights.bytes
    assert len(hubs[0].asked) > 2
    assert hubs[0].sent < (tmp_path / "m" / "x.gguf").stat().st_size
    with pytest.raises(ModelError, match=r"there is no y\.gguf"):
        describe(f"{hubs[0].address}/owner/name/resolve/main/y.gguf")
    (tmp_path / "m" / "x.gguf").write_bytes(b"GGUF" + bytes(2000))
    with pytest.raises(ModelError, match="GGUF version 0"):
        describe(f"{hubs[0].address}/owner/name/resolve/main/x.gguf")


@pytest.mark.parametrize("moe", [False, True])
def test_a_gguf_file_is_sized_by_its_header_to_the_byte(tmp_path: Path, moe: bool) -> None:
    found = describe(str(_gguf(tmp_path / "m.gguf", moe=moe)))
    assert found.stored is not None
    assert found.weights.bytes == found.stored.bytes
    assert found.stored.values == found.shape.parameters
    assert found.shape.kv_bytes_per_token() == 2 * 2 * 2 * 32 * 2
    assert (found.shape.active < found.shape.parameters) is moe


def test_the_default_model_is_sized_as_info_has_it(smollm2: Path) -> None:
    found = describe(str(smollm2))
    assert found.shape.parameters == 134_515_008
    assert found.weights.bytes == 96_576_768
    assert found.shape.kv_bytes_per_token() == 2 * 30 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("llama.block_count", 3), "its tensors hold .* parameters, but its metadata describe"),
        (("general.architecture", "rwkv6"), "'rwkv6' is not known of GGUF files"),
        (("llama.memory_banks", 4), "memory_banks are not understood"),
        (("split.count", 2), "one of 2 parts"),
    ],
)
def test_a_gguf_file_that_is_not_understood_is_refused(tmp_path: Path, change: tuple[str, Any], words: str) -> None:
    header = gguf.local(_gguf(tmp_path / "m.gguf"))
    header.metadata[change[0]] = change[1]
    with pytest.raises(ModelError, match=words):
        gguf.described(header)


def test_a_matrix_of_a_gguf_file_that_is_not_found_is_not_guessed(tmp_path: Path) -> None:
    header = gguf.local(_gguf(tmp_path / "m.gguf"))
    header.tensors["blk.1.attn_other.weight"] = header.tensors.pop("blk.1.attn_q.weight")
    with pytest.raises(ModelError, match=r"known to be self_attn\.q_proj of layer 1"):
        gguf.described(header)
