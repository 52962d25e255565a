"""Fills in shapes.json: how many parameters transformers gives each configuration there.

    python tests/twin/golden/make.py    (where transformers and torch are; models are built without memory)

The configurations are small ones of every architecture, with sizes so odd that no two products are alike: a rule that
takes the wrong field is off by a number of its own. To add one, write its `config` into the file and run this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHAPES = Path(__file__).parent / "shapes.json"


def main() -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shapes = json.loads(SHAPES.read_text())
    for entry in shapes.values():
        given = entry["config"]
        auto = AutoModelForImageTextToText if "vision_config" in given else AutoModelForCausalLM
        config = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given))
        with torch.device("meta"):
            model = auto.from_config(config)
        entry["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    lines = (f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in shapes.items())
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(shapes)} models", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
