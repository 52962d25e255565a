"""Makes encoders.json beside this file. Needs torch, transformers and sentence-transformers:

    python tests/golden/make_encoders.py FOLDER    # FOLDER: all-MiniLM-L6-v2, as `tailrace pull minilm` leaves it

`models` are of the small random checkpoints that tests/models/random_bert.py writes, from transformers' own classes in
float32; `minilm` is what sentence-transformers makes of a few sentences. The tests need none of these.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models import random_bert

TEXTS = [[2, 5, 6, 7, 8, 9, 3], [2, 10, 3], [2, *range(5, 40), 3]]
SEGMENTS = [4, 2, 20]
"""Where the second text of each begins."""
SENTENCES = ["The water mill turns.", "A wheel!", "naïve café résumé 東京 and a long unbelievable word " * 6]


def rows(folder: Path, kind: str, labels: int) -> list[list[float]]:
    """Raw scores of pairs, or the last hidden rows' mean."""
    found = []
    loader = AutoModelForSequenceClassification if labels else AutoModel
    model = loader.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    for ids, second in zip(TEXTS, SEGMENTS, strict=True):
        arguments: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if labels and kind == "bert":
            arguments["token_type_ids"] = torch.tensor([[int(at >= second) for at in range(len(ids))]])
        with torch.no_grad():
            out = model(**arguments)
        found.append((out.logits[0] if labels else out.last_hidden_state[0].mean(0)).tolist())
    return found


if __name__ == "__main__":
    made: dict[str, Any] = {"texts": TEXTS, "segments": SEGMENTS, "models": {}, "sentences": SENTENCES}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("bert", "roberta"):
            for labels in (0, 1):
                folder = random_bert.write(Path(scratch) / f"{kind}-{labels}", kind, labels=labels)
                made["models"][f"{kind}-{labels}"] = rows(folder, kind, labels)
    sentence = SentenceTransformer(sys.argv[1], device="cpu")
    made["minilm_ids"] = [sentence.tokenizer(text)["input_ids"] for text in SENTENCES]
    made["minilm"] = [[round(float(x), 8) for x in row] for row in sentence.encode(SENTENCES)]
    (Path(__file__).parent / "encoders.json").write_text(json.dumps(made))
