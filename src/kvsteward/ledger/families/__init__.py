"""One reader per family of architectures, and the table that names them by `model_type`.

To add one: a function `Reader -> tuple[Layer, ...]` in the file of its idea, and a row here.
"""

from __future__ import annotations

from kvsteward.ledger.families import encdec, latent, plain, recurrent, windows
from kvsteward.ledger.families.base import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    **plain.TABLE,
    **windows.TABLE,
    **latent.TABLE,
    **recurrent.TABLE,
    **encdec.TABLE,
}
