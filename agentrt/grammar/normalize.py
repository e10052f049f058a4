"""Being written."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from agentrt.grammar.ledger import Ledger

@dataclass(frozen=True)
class Normalized:
    schema: Any
    definitions: dict[str, Any]
    ledger: Ledger

    def whole(self, x):
        return {"x-guidance": x, **(self.schema if isinstance(self.schema, dict) else {"allOf": [self.schema]})}

def normalize(schema: Any, prefix: str = "") -> Normalized:
    return Normalized(schema, {}, ())
