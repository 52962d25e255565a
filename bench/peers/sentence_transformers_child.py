"""sentence-transformers as a child process of bench/embeddings.py: run by a Python that has it.

    python sentence_transformers_child.py FOLDER THREADS

The first line of standard input has the token ids (JSON); each one after that has them embedded once. Answers are
lines of JSON: seconds of wall and of processor time; the first has the embeddings too.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    model = SentenceTransformer(sys.argv[1], device="cpu")
    ids = torch.tensor(json.loads(sys.stdin.readline()))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with torch.inference_mode():
        first = model(dict(batch))["sentence_embedding"]
        print(json.dumps(first.tolist()), flush=True)
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            model(dict(batch))
            print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
