"""From `tailrace serve`'s command line to the settings of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import options, serve
from tailrace.terms import InvalidInput
from tests.cli.conftest import Run


def settings(*arguments: str) -> Any:
    values = options.parse(arguments, options.SERVE)
    assert values is not None
    return serve.settings(values)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAILRACE_API_KEY", "TAILRACE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_without_options_everything_has_the_servers_default() -> None:
    from tailrace.api.settings import Settings

    made = settings()
    assert made == Settings(model="smollm2-135m", served_names=("smollm2-135m", "smollm2", "smollm2-135m-instruct"))


def test_every_option_reaches_its_setting(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "admin").write_text("boss\n")
    made = settings(
        str(tmp_path / "m.gguf"), "--host", "::1", "--port=0", "--api-key", "a", "--api-key", "b", "--served-name", "x",
        "--kv-tokens", "64", "--max-context", "32", "--step-tokens", "16", "--max-running", "3", "--max-waiting", "4",
        "--no-prefix-cache", "--threads", "2", "--kernels", "avx2", "--kv-dtype", "k8v4", "--kv-dtype-skip", "0,1",
        "--backend", "reference",
        "--quantize", "int4", "--kv-policy", "ttl", "--kv-ttl", "90", "--kv-tenant-share", "0.5",
        "--kv-disk", "kv", "--kv-disk-bytes", "500MB", "--kv-key-file", "k",
        "--kv-valkey", "valkey://:pw@h", "--kv-valkey-ttl", "60", "--kv-valkey-password-file", "p",
        "--request-timeout", "9", "--drain-timeout", "5", "--hang-timeout", "6", "--start-timeout", "7",
        "--stuck-timeout", "8", "--lora-timeout", "3", "--chat-template", "hermes",
        "--kv-events", "tcp://[::1]:1", "--kv-events-replay", "tcp://[::1]:2", "--kv-events-key", "keys.toml",
        "--cache", str(tmp_path), "--no-template-args", "--no-log-requests", "--quiet",
        "--keys", "keys.json", "--admin-key-file", str(tmp_path / "admin"), "--tls-cert", "c.pem", "--tls-key", "k.pem",
        "--cors-origin", "https://a.test", "--cors-origin=*", "--unknown-parameters", "warn", "--log-prompts",
        "--limit", "choices=4", "--limit", "body_bytes=1000",
        "--lora", "a=x/y", "--lora", "b=z=z", "--lora-dir", "loras", "--max-loras", "3",
    )  # fmt: skip
    assert (made.host, made.port, made.api_keys, made.served_names) == ("::1", 0, ("a", "b"), ("x",))
    assert (made.kv_tokens, made.max_context, made.step_tokens) == (64, 32, 16)
    assert (made.max_running, made.max_waiting, made.prefix_cache) == (3, 4, False)
    assert (made.threads, made.kernels, made.backend) == (2, "avx2", "reference")
    for one in (made, made.engine()):
        assert (one.kv_dtype, one.kv_dtype_skip) == ("k8v4", "0,1")
    assert (made.kv_policy, made.kv_ttl, made.kv_tenant_share) == ("ttl", 90, 0.5)
    assert made.quantize == made.engine().quantize == "int4"
    assert (made.loras, made.lora_dir, made.max_loras) == ((("a", "x/y"), ("b", "z=z")), "loras", 3)
    assert made.engine().max_loras == 3
    for one in (made, made.engine()):
        assert (one.kv_events, one.kv_events_replay) == ("tcp://[::1]:1", "tcp://[::1]:2")
        assert one.kv_events_key == "keys.toml"
    for told in (made, made.engine()):
        assert (told.kv_disk, told.kv_disk_bytes, told.kv_key_file) == ("kv", 500_000_000, "k")
        assert (told.kv_valkey, told.kv_valkey_ttl, told.kv_valkey_password_file) == ("valkey://:pw@h", 60, "p")
    assert "pw" not in repr(made)
    assert made.chat_template == "hermes"
    assert made.timeouts.lora == made.engine().lora_seconds == 3
    times = made.timeouts
    assert (times.request, times.drain, times.hang, times.start, times.stuck) == (9, 5, 6, 7, 8)
    assert (made.cache_dir, made.template_args) == (str(tmp_path), False)
    assert (made.log_requests, made.quiet) == (False, True)
    assert (made.keys, made.admin_keys, made.tls_cert, made.tls_key) == ("keys.json", ("boss",), "c.pem", "k.pem")
    assert made.cors_origins == ("https://a.test", "*")
    assert (made.unknown_parameters, made.log_prompts) == ("warn", True)
    assert (made.limits.choices, made.limits.body_bytes, made.limits.prompts) == (4, 1000, 128)


def test_the_ledger_is_the_users_own_unless_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILRACE_LEDGER", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert settings().ledger == str(tmp_path / "data" / "tailrace" / "ledger.db")
    monkeypatch.setenv("TAILRACE_LEDGER", "elsewhere.db")
    assert settings().ledger == "elsewhere.db"
    assert settings("--ledger", "off").ledger is None
    (tmp_path / "p.toml").write_text("[rented]\nusd_per_hour = 2.5\n")
    made = settings(
        "--ledger", "postgresql://ada:pw@h/db", "--ledger-spool", "s", "--ledger-retention", "2d", "--ledger-rows", "9",
        "--slo", "ttft=0.5", "--price", str(tmp_path / "p.toml"),
    )  # fmt: skip
    assert (made.ledger, made.ledger_spool, made.ledger_retention) == ("postgresql://ada:pw@h/db", "s", 172_800)
    assert (made.ledger_rows, made.slo, made.usd_per_hour) == (9, "ttft=0.5", 2.5)
    assert "pw" not in repr(made)
    (tmp_path / "p.toml").write_text("[api.x]\nusd_per_million_input = 1\nusd_per_million_output = 2\n")
    with pytest.raises(InvalidInput, match="neither"):
        settings("--price", str(tmp_path / "p.toml"))


@pytest.mark.parametrize("text", ["choices", "choices=", "choices=-1", "choise=1", "choices=x", "=1"])
def test_a_limit_that_is_none_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(InvalidInput, match="--limit is NAME=NUMBER with one of connections, body_bytes, choices"):
        settings("--limit", text)


@pytest.mark.parametrize("text", ["a", "a=", "=x", ""])
def test_an_adapter_is_a_name_and_a_path(text: str) -> None:
    with pytest.raises(InvalidInput, match="--lora is NAME=PATH"):
        serve.adapters([text])


def test_a_chat_template_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidInput, match="--chat-template: 'hermes2' is neither a file nor one of hermes, llama3"):
        settings("--chat-template", "hermes2").check()


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("3kB", 3000), ("3kiB", 3072), ("1.5GiB", 3 << 29), ("2 TB", 2 * 10**12)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert serve.size_of(text, "kv_disk_bytes") == size


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1", "4GiBs", "1e9", "4iB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match="--kv-disk-bytes is a size such as 500MB"):
        serve.size_of(text, "kv_disk_bytes")


def test_a_path_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    assert settings(str(tmp_path / "mine.gguf")).names == ("mine",)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\none\n two \n")
    assert settings("--api-key-file", str(file)).api_keys == ("one", "two")
    monkeypatch.setenv("TAILRACE_API_KEY", "three")
    assert settings().api_keys == ("three",)
    assert settings("--api-key", "four").api_keys == ("four",)
    monkeypatch.setenv("TAILRACE_ADMIN_KEY", "five")
    made = settings("--admin-key-file", str(file))
    assert (made.admin_keys, settings().admin_keys, settings().api_keys) == (("one", "two"), ("five",), ("three",))


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidInput, match="--api-key-file"):
        settings("--api-key-file", str(file))


def test_a_text_is_pinned_as_the_chat_template_renders_it(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("<|im_start|>system\nYou are a river guide.<|im_end|>\n")
    made, load_text = serve._with_pins(settings(str(smollm2)), [str(file)])
    assert load_text is not None
    text = load_text(made)
    messages = [{"role": "system", "content": "You are a river guide."}, {"role": "user", "content": "Hello!"}]
    (pinned,) = made.kv_pin
    assert len(pinned) > 8
    assert text.encode_chat(messages)[: len(pinned)] == list(pinned)
    assert load_text(made) is text  # loaded once


def test_a_file_that_cannot_be_pinned_is_refused_before_anything_is_served(run: Run, tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text(str([5] * 700))
    sizes = ("--kv-tokens", "1024", "--max-context", "512", "--port", "0")
    for pin, said in (("nowhere", "--kv-pin nowhere"), ("long.json", "raise --kv-tokens to at least 1200")):
        file = str(tmp_path / pin) if pin == "long.json" else pin
        ended = run("serve", "smollm2-135m", *sizes, "--kv-pin", file)
        assert ended.returncode == 2
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_directory_that_the_forked_engine_cannot_use_is_wrong_use_in_one_sentence(run: Run, smollm2: Path) -> None:
    ended = run("serve", str(smollm2), "--kv-tokens", "1024", "--port", "0", "--quiet", "--kv-disk", "/proc/tailrace")
    assert ended.returncode == 2
    why = "KV pages cannot be kept in /proc/tailrace: No such file or directory"
    assert ended.stderr == f"tailrace: cannot serve {smollm2}: {why}\n"


def test_an_unknown_model_says_which_are_known(run: Run) -> None:
    ended = run("serve", "smolm2-135m")
    assert ended.returncode == 1
    assert "Did you mean smollm2-135m?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_and_version(run: Run) -> None:
    assert run("--version").stdout.startswith("tailrace 0.")
    shown = run("serve", "--help").stdout
    assert all(option.flag in shown for option in options.SERVE.options)
    assert "tailrace serve ./model.gguf" in shown
    for command in ("pull", "info", "chat", "generate"):
        assert "Examples" in run(command, "--help").stdout


def test_completion_scripts_are_offered(run: Run) -> None:
    # told which shell it is: what typer finds out by itself depends on who began these tests
    assert "tailrace" in run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    completed = run(_TAILRACE_COMPLETE="complete_bash", COMP_WORDS="tailrace pull smol", COMP_CWORD="2")
    assert completed.stdout.split() == ["smollm2-135m"]
