"""What is said of the endpoints that find what is stored: responses, chats, files, batches."""

from __future__ import annotations

from dataclasses import replace

from tailrace.api.batches import endpoints as batches
from tailrace.api.batches import files
from tailrace.api.content import chats
from tailrace.api.reference import answers
from tailrace.api.reference.declare import Endpoint, Json, Parameter, differs, identified, parameters, queries, row
from tailrace.api.reference.schemas import LABELS
from tailrace.api.responses import endpoints as responses

STORE = "`--content-store`"
PAGE: dict[str, Parameter] = {
    "after": row("the id that the page before ended with", None, {"type": "string"}),
    "limit": row("entries of a page; 20 where it is absent", 2, {"type": "integer", "minimum": 1, "maximum": 100}),
    "order": row("by age", "asc", {"enum": ["asc", "desc"]}),
}
INCLUDE = row("nothing more is stored than is shown", None, {"type": "string"})
MANY: Json = {"type": "integer", "minimum": 1, "maximum": files.MOST_LISTED}
NEWEST = {name: PAGE[name] for name in batches.LISTING}


def _form(name: str, note: str, example: object, schema: Json | None = None, *, required: bool = False) -> Parameter:
    return Parameter(name, note, example, schema=schema or {"type": "string"}, place="form", required=required)


FORM = {
    "file": _form("file", "", None, {"contentMediaType": "application/octet-stream"}, required=True),
    "purpose": replace(
        _form("purpose", "only `batch`", "batch", {"enum": ["batch"]}, required=True), status="different"
    ),
    "expires_after[anchor]": _form("expires_after[anchor]", "", "created_at", {"enum": ["created_at"]}),
    "expires_after[seconds]": _form(
        "expires_after[seconds]",
        "",
        files.LEAST_SECONDS,
        {"type": "integer", "minimum": files.LEAST_SECONDS, "maximum": files.MOST_SECONDS},
    ),
}
BATCH: dict[str, Parameter] = {
    "input_file_id": row("of a file with the purpose `batch`", None),
    "endpoint": row("", batches.ENDPOINTS[0], {"enum": list(batches.ENDPOINTS)}),
    "completion_window": differs("any time up to 30 days: `30m`, `24h`, `7d`", "24h"),
    "metadata": row("", {}, LABELS),
    "output_expires_after": row("the store's retention where it is absent", {"anchor": "created_at", "seconds": 3600}),
}

STORED = (
    Endpoint(
        "GET",
        ("/v1/responses/{id}",),
        "A stored response, or one that runs in the background.",
        answers.Response,
        (
            identified("of the response"),
            *queries(
                responses.SHOWING,
                {
                    "include": INCLUDE,
                    "include[]": INCLUDE,
                    "stream": differs("only `false`: events are not stored", "false", {"enum": ["false"]}),
                },
            ),
        ),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "DELETE",
        ("/v1/responses/{id}",),
        "Deletes a response; one that still runs is cancelled.",
        answers.Deleted,
        (identified("of the response"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "POST",
        ("/v1/responses/{id}/cancel",),
        "Ends a response that runs in the background.",
        answers.Response,
        (identified("of the response"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/responses/{id}/input_items",),
        "All that a response was an answer to.",
        answers.Listed,
        (
            identified("of the response"),
            *queries(responses.ITEMS, {**PAGE, "include": INCLUDE, "include[]": INCLUDE}),
        ),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/chat/completions",),
        "The chat completions that were stored; `metadata[NAME]=VALUE` finds those with it.",
        answers.Listed,
        queries(chats.LISTING, {**PAGE, "model": row("", None, {"type": "string"})}),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/chat/completions/{id}",),
        "A stored chat completion.",
        answers.StoredChat,
        (identified("of the completion"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "POST",
        ("/v1/chat/completions/{id}",),
        "Gives a stored chat completion other metadata.",
        answers.StoredChat,
        (
            identified("of the completion"),
            *parameters(chats.Update, {"metadata": row("in place of what there was", {"topic": "rivers"}, LABELS)}),
        ),
        chats.Update,
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "DELETE",
        ("/v1/chat/completions/{id}",),
        "Deletes a stored chat completion.",
        answers.Deleted,
        (identified("of the completion"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/chat/completions/{id}/messages",),
        "The messages that a stored chat completion was an answer to.",
        answers.Listed,
        (identified("of the completion"), *queries(chats.PAGE, PAGE)),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "POST",
        ("/v1/files",),
        "Stores a file of requests ([batches](batches.md)).",
        answers.File,
        tuple(FORM[name] for name in files.FIELDS),
        errors=(404, 507),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/files",),
        "The files.",
        answers.Listed,
        queries(
            files.LISTING,
            {
                **PAGE,
                "limit": row(f"entries of a page; {files.MOST_LISTED:,} where it is absent", 2, MANY),
                "purpose": row("", "batch", {"type": "string"}),
            },
        ),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/files/{id}",),
        "What is known of a file.",
        answers.File,
        (identified("of the file"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "DELETE",
        ("/v1/files/{id}",),
        "Deletes a file, unless a batch still reads it.",
        answers.Deleted,
        (identified("of the file"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/files/{id}/content",),
        "The file itself.",
        "application/octet-stream",
        (identified("of the file"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "POST",
        ("/v1/batches",),
        "Asks for the answers to a file of requests.",
        answers.StoredBatch,
        parameters(batches.Create, BATCH),
        batches.Create,
        errors=(404, 507),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/batches",),
        "The batches, the newest first.",
        answers.Listed,
        queries(batches.LISTING, NEWEST),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "GET",
        ("/v1/batches/{id}",),
        "A batch.",
        answers.StoredBatch,
        (identified("of the batch"),),
        errors=(404,),
        needs=STORE,
    ),
    Endpoint(
        "POST",
        ("/v1/batches/{id}/cancel",),
        "Gives up what of a batch has not been answered.",
        answers.StoredBatch,
        (identified("of the batch"),),
        errors=(404,),
        needs=STORE,
    ),
)
