"""Which families there are. To add one, declare it in the module that it is most like; everything else follows."""

from __future__ import annotations

from tailrace.twin.shapes.families import dense, experts, hybrid, latent, special
from tailrace.twin.shapes.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (dense, experts, hybrid, latent, special)
    for family in module.FAMILIES
    for name in family.types
}
"""By `model_type`."""
