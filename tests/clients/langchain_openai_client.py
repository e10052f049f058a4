"""langchain-openai: invoke, stream, `with_structured_output` in its three ways, and bound tools."""

from __future__ import annotations

import sys
from importlib.metadata import version

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=80, max_retries=0, timeout=120)
assert chat.invoke("Say hello.").content
assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == chat.invoke("Say hello.").content


class Person(BaseModel):
    """A person."""

    name: str
    age: int


for method in ("json_schema", "function_calling"):
    person = chat.with_structured_output(Person, method=method).invoke("Anna is 31 years old.")
    assert person == Person(name="Anna", age=31), (method, person)
assert isinstance(chat.with_structured_output(None, method="json_mode").invoke('Answer in JSON: {"ok": true}'), dict)


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


message = chat.bind_tools([get_weather], tool_choice="required").invoke("What is the weather in Paris?")
assert message.tool_calls[0]["args"] == {"city": "Paris"}, message
print("ok", version("langchain-openai"))
