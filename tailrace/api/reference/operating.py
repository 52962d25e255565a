"""What is said of the endpoints that tell of the server, and of those of its operator."""

from __future__ import annotations

from tailrace.api import admin
from tailrace.api.profile import MOST_SECONDS, MOST_STEPS
from tailrace.api.reference import answers
from tailrace.api.reference.declare import Endpoint, Parameter, identified, parameters, row

READY = Parameter("ready", "as `/health/ready`", place="query", schema={"type": "string"})
SLEEP_QUERY = (
    Parameter("level", "vLLM's", "1", place="query", schema={"enum": ["1"]}),
    Parameter("mode", "vLLM's: `wait` is `finish`", "wait", place="query", schema={"enum": list(admin.MODES)}),
)
NOTHING = parameters(admin.Nothing, {})

OPERATING = (
    Endpoint(
        "GET",
        ("/v1/models",),
        "The names of the served model; with the header `anthropic-version`, [as Anthropic has "
        "them](anthropic.md#get-v1models).",
        answers.ModelList,
    ),
    Endpoint(
        "GET",
        ("/v1/models/{id}",),
        "One of the names; likewise.",
        answers.ModelCard,
        (identified("the name"),),
        errors=(404,),
    ),
    Endpoint("GET", ("/health",), "200 while the server works, 503 else.", answers.Health, (READY,), errors=(503,)),
    Endpoint(
        "GET", ("/health/ready",), "200 while a request would be served.", answers.Health, (READY,), errors=(503,)
    ),
    Endpoint(
        "GET",
        ("/health/live",),
        "200 unless the server cannot help itself any more.",
        answers.Health,
        (READY,),
        errors=(503,),
    ),
    Endpoint("GET", ("/metrics",), "Prometheus metrics.", "text/plain"),
    Endpoint("GET", ("/version",), "The server's version.", answers.Version),
    Endpoint("GET", ("/openapi.json",), "These endpoints as an OpenAPI document.", dict[str, object]),
)

ADMIN = (
    Endpoint("GET", ("/admin/state",), "What the server is doing.", dict[str, object]),
    Endpoint("GET", ("/admin/requests",), "The requests that run.", answers.RequestList),
    Endpoint(
        "GET",
        ("/admin/requests/{id}",),
        "The timeline of a request that runs, or is among the last that ended.",
        answers.RequestList,
        (identified("of its answer, or its x-request-id"),),
        errors=(404,),
    ),
    Endpoint(
        "POST",
        ("/admin/abort",),
        "Ends requests; one of the parameters is given.",
        answers.Done,
        parameters(
            admin.Abort,
            {
                "request": row("id of an answer, or x-request-id of a call", None),
                "tenant": row("all of a tenant's", "research"),
                "key": row("all of a key's", "key-0"),
                "all": row("all", True),
            },
        ),
        admin.Abort,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        ("/admin/pause",),
        "New requests get 503.",
        answers.Done,
        parameters(admin.Pause, {"running": row("what becomes of those that run", "finish")}),
        admin.Pause,
    ),
    Endpoint("POST", ("/admin/resume",), "Ends a pause.", answers.Done, NOTHING, admin.Nothing),
    Endpoint(
        "POST", ("/admin/drain",), "Finishes what runs and ends the server.", answers.Done, NOTHING, admin.Nothing
    ),
    Endpoint("POST", ("/admin/reset_prefix_cache",), "Forgets what is cached.", answers.Done, NOTHING, admin.Nothing),
    Endpoint(
        "POST",
        ("/admin/log_level",),
        "What is logged; one of the parameters is given, or both.",
        answers.Done,
        parameters(
            admin.Level,
            {"level": row("of the API", "requests"), "engine": row("of the engine process", "warning")},
        ),
        admin.Level,
    ),
    Endpoint(
        "POST",
        ("/admin/sleep", "/sleep"),
        "Gives the engine's memory back.",
        answers.Done,
        (
            *parameters(
                admin.Asleep,
                {
                    "level": row("only 1", 1, {"enum": [1]}),
                    "running": row("what becomes of requests that run; `refuse`: no sleep while there are", "finish"),
                },
            ),
            *SLEEP_QUERY,
        ),
        admin.Asleep,
        errors=(409,),
    ),
    Endpoint(
        "POST",
        ("/admin/load_lora_adapter", "/v1/load_lora_adapter"),
        "Loads a LoRA adapter, which requests get by its name.",
        answers.Done,
        parameters(
            admin.Load,
            {
                "lora_name": row("the model of requests that want it", "poet"),
                "lora_path": row("below the directory of `--lora-dir`", "poet"),
                "load_inplace": row(
                    "also where the name is another adapter's", True, lora_name="poet", lora_path="poet"
                ),
            },
        ),
        admin.Load,
        errors=(409,),
        needs="`--lora-dir`",
    ),
    Endpoint(
        "POST",
        ("/admin/unload_lora_adapter", "/v1/unload_lora_adapter"),
        "Requests that come later do not get the adapter; those that run end as ever.",
        answers.Done,
        parameters(admin.Unload, {"lora_name": row("", "poet")}),
        admin.Unload,
        errors=(404,),
    ),
    Endpoint("POST", ("/admin/wake", "/wake_up"), "Wakes the engine up.", answers.Done, NOTHING, admin.Nothing),
    Endpoint("GET", ("/admin/is_sleeping", "/is_sleeping"), "Whether the engine sleeps.", answers.Sleeping),
    Endpoint(
        "POST",
        ("/admin/profile",),
        "A trace of what the server does, for Perfetto; one of the parameters is given, or both.",
        dict[str, object],
        parameters(
            admin.Profiled,
            {
                "seconds": row("", 0.05, {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS}),
                "steps": row("", 5, {"type": "integer", "minimum": 1, "maximum": MOST_STEPS}, seconds=0.05),
            },
        ),
        admin.Profiled,
        errors=(409,),
    ),
)
