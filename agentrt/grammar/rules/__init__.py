"""What each keyword of JSON Schema becomes: a rule for each, by the kind of value that it is about.

A rule writes what the engine shall enforce into its `Place`, and tells the ledger exactly one standing; it never drops its keyword in silence.
"""

from __future__ import annotations

from agentrt.grammar.rewriter import Rule
from agentrt.grammar.rules import (
    arrays,
    combinations,
    counts,
    dependencies,
    names,
    numbers,
    objects,
    references,
    strings,
    values,
)

RULES: dict[str, Rule] = {
    "type": values.type_,
    "enum": values.enum,
    "const": values.const,
    "minimum": numbers.bound,
    "maximum": numbers.bound,
    "exclusiveMinimum": numbers.bound,
    "exclusiveMaximum": numbers.bound,
    "multipleOf": numbers.multiple_of,
    "minLength": counts.length,
    "maxLength": counts.length,
    "minItems": counts.length,
    "maxItems": counts.length,
    "minProperties": counts.properties_count,
    "maxProperties": counts.properties_count,
    "pattern": strings.pattern,
    "format": strings.format_,
    "items": arrays.items,
    "additionalItems": arrays.additional_items,
    "prefixItems": arrays.prefix_items,
    "contains": arrays.contains,
    "uniqueItems": arrays.unique_items,
    "unevaluatedItems": arrays.unevaluated_items,
    "required": objects.required,
    "properties": objects.properties,
    "patternProperties": objects.pattern_properties,
    "additionalProperties": objects.additional_properties,
    "propertyNames": names.property_names,
    "unevaluatedProperties": objects.unevaluated_properties,
    "dependentRequired": dependencies.dependent_required,
    "dependentSchemas": dependencies.dependent_schemas,
    "dependencies": dependencies.dependencies,
    "allOf": combinations.all_of,
    "anyOf": combinations.any_of,
    "oneOf": combinations.one_of,
    "not": combinations.not_,
    "if": combinations.if_,
    "$ref": references.ref,
    "$dynamicRef": references.ref,
    "$recursiveRef": references.recursive_ref,
}
