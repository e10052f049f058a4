"""smolagents: an agent that calls tools until it has its answer."""

from __future__ import annotations

import sys
from importlib.metadata import version

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

url, name = sys.argv[1:]
asked = []


@tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: The city.
    """
    asked.append(city)
    return f"It is sunny in {city}."


model = OpenAIServerModel(model_id=name, api_base=f"{url}/v1", api_key="none", temperature=0.0, max_tokens=100)
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
answer = agent.run("What is the weather in Paris? Call get_weather first, then final_answer.")
assert asked, "the tool was never called"
assert answer
print("ok", version("smolagents"))
