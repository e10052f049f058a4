"""JSON Schemas that ship with agentrt (import name: agentrt.schemas)."""
