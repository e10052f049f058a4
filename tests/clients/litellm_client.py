"""litellm: a completion, a stream, and a call of a tool."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look at the network for prices
import litellm

url, model = sys.argv[1:]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "timeout": 120, "num_retries": 0}
say = [{"role": "user", "content": "Say hello."}]
whole = litellm.completion(messages=say, max_tokens=8, **common).choices[0].message.content
assert whole
pieces = litellm.completion(messages=say, max_tokens=8, stream=True, **common)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": parameters}}
ask = [{"role": "user", "content": "What is the weather in Paris?"}]
choice = litellm.completion(messages=ask, tools=[tool], tool_choice="required", max_tokens=60, **common).choices[0]
assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}, choice
assert choice.finish_reason == "tool_calls"
print("ok", version("litellm"))
