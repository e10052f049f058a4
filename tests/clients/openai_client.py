"""The openai client: chat, a stream, `.parse()` with nested and optional models, tools in a stream, responses."""

from __future__ import annotations

import json
import sys

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
say = [{"role": "user", "content": "Say hello."}]

answer = client.chat.completions.create(model=model, messages=say, max_tokens=8, temperature=0)
assert answer.choices[0].message.content
assert answer.usage.prompt_tokens_details.cached_tokens >= 0
stream = client.chat.completions.create(model=model, messages=say, max_tokens=8, temperature=0, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content


class Owner(BaseModel):
    name: str
    age: int | None = None


class Pet(BaseModel):
    kind: str
    owner: Owner


ask = [{"role": "user", "content": "Rex is a dog. Its owner is Anna, 31 years old."}]
pet = client.chat.completions.parse(model=model, messages=ask, response_format=Pet, max_tokens=80, temperature=0).choices[0].message.parsed
assert pet.owner.name == "Anna", pet

tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
        "strict": True,
    },
}
ask = [{"role": "user", "content": "What is the weather in Paris?"}]
with client.chat.completions.stream(model=model, messages=ask, tools=[tool], tool_choice="required", max_tokens=60, temperature=0) as events:
    message = events.get_final_completion().choices[0].message
assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}, message
assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
turns = [*ask, message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})]
turns += [{"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"} for call in message.tool_calls]
for turn in turns[1]["tool_calls"]:
    turn["function"].pop("parsed_arguments", None)
class Report(BaseModel):
    weather: str


final = client.chat.completions.parse(
    model=model, messages=turns, tools=[tool], tool_choice="none", response_format=Report, max_tokens=40, temperature=0
)
assert "sunny" in final.choices[0].message.parsed.weather.lower(), final

first = client.responses.create(model=model, input="Say hello.", max_output_tokens=16, temperature=0)
assert first.output_text
second = client.responses.create(model=model, input="Again.", previous_response_id=first.id, max_output_tokens=16, temperature=0)
assert second.previous_response_id == first.id
parsed = client.responses.parse(model=model, input="Anna is 31.", text_format=Owner, max_output_tokens=60, temperature=0)
assert parsed.output_parsed.name == "Anna", parsed
print("ok", openai.__version__)
