"""pydantic-ai: an agent with a typed output, and one with a tool."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
settings = {"temperature": 0.0, "max_tokens": 100}


class Person(BaseModel):
    name: str
    age: int


typed = Agent(model, output_type=Person, model_settings=settings)
assert typed.run_sync("Anna is 31 years old.").output == Person(name="Anna", age=31)

asked = []
agent = Agent(model, model_settings=settings)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return f"It is sunny in {city}."


with suppress(UsageLimitExceeded):  # so small a model may go on asking
    agent.run_sync("What is the weather in Paris? Use the tool.", usage_limits=UsageLimits(request_limit=2))
assert asked[0] == "Paris", asked
print("ok", version("pydantic-ai-slim"))
