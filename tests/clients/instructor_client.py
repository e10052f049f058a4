"""instructor: a model by tools and one by JSON schema, with a validator of the user's that must hold."""

from __future__ import annotations

import sys
from importlib.metadata import version

import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field(ge=0, le=150)


raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
ask = [{"role": "user", "content": "Anna is 31 years old."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(raw, mode=mode)
    person = client.chat.completions.create(model=model, messages=ask, response_model=Person, max_tokens=80, temperature=0, max_retries=0)
    assert (person.name, person.age) == ("Anna", 31), person
print("ok", version("instructor"))
