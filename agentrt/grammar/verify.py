"""Being written."""
from __future__ import annotations
import json
from collections.abc import Callable
from typing import Any
import jsonschema

Verdict = Callable[[str], list[str]]

class Verifier:
    def __init__(self, schema: Any) -> None:
        self._v = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    def violations(self, value: Any) -> list[str]:
        return [f"{e.json_path}: {e.message}" for e in self._v.iter_errors(value)]
    def verdict(self, text: str) -> list[str]:
        try: return self.violations(json.loads(text))
        except ValueError as e: return [str(e)]

def verifier_of(schema):
    return Verifier(schema)
