"""openai-agents: an agent with a tool, and one with an `output_type`, over responses and over chat completions."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
asked = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return f"It is sunny in {city}."


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=name, openai_client=client)
        typed = Agent(name="reader", instructions="Extract.", model=model, output_type=Person, model_settings=ModelSettings(temperature=0, max_tokens=80))
        assert (await Runner.run(typed, "Anna is 31 years old.")).final_output == Person(name="Anna", age=31)
        settings = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
        agent = Agent(name="weather", instructions="Use the tool.", model=model, tools=[get_weather], model_settings=settings)
        answer = await Runner.run(agent, "What is the weather in Paris?", max_turns=4)
        assert isinstance(answer.final_output, str)
        assert "Paris" in asked, asked
        asked.clear()


asyncio.run(main())
print("ok", version("openai-agents"))
