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
        # How often so small a model calls is its own affair, so each of the two turns is told what to do.
        settings = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
        agent = Agent(
            name="weather", instructions="Use the tool.", model=model, tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        called = await Runner.run(agent, "What is the weather in Paris?", max_turns=2)
        assert "Paris" in asked, asked
        assert called.final_output == f"It is sunny in {asked[0]}."
        teller = agent.clone(tool_use_behavior="run_llm_again", model_settings=ModelSettings(temperature=0, max_tokens=80, tool_choice="none"))
        told = await Runner.run(teller, called.to_input_list(), max_turns=1)
        assert isinstance(told.final_output, str)
        assert told.final_output
        asked.clear()


asyncio.run(main())
print("ok", version("openai-agents"))
