"""An MCP server of one tool, over standard input and output: the agent starts it as a subprocess."""

from __future__ import annotations

from typing import Literal

from mcp.server.mcpserver import MCPServer

Unit = Literal["km", "mile", "kg", "pound", "litre", "gallon", "hour", "minute"]
SIZES = {
    "km": 1.0,
    "mile": 1.609344,
    "kg": 1.0,
    "pound": 0.45359237,
    "litre": 1.0,
    "gallon": 3.785411784,
    "hour": 60.0,
    "minute": 1.0,
}
KINDS = ({"km", "mile"}, {"kg", "pound"}, {"litre", "gallon"}, {"hour", "minute"})

server = MCPServer("units")


@server.tool()
def convert_units(value: float, from_unit: Unit, to_unit: Unit) -> float:
    """Converts a quantity into another unit: miles, pounds, gallons, hours and so on."""
    if not any({from_unit, to_unit} <= kind for kind in KINDS):
        raise ValueError(f"{from_unit} cannot be turned into {to_unit}")
    return round(value * SIZES[from_unit] / SIZES[to_unit], 2)


if __name__ == "__main__":
    server.run("stdio")
