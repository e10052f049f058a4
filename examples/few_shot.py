"""Few-shot questions over a batch: the examples are computed once, for all questions together."""

from __future__ import annotations

import agentrt

SHOTS = """These are countries, their capitals, and the continents that they lie in.

Country: Sweden
Capital: Stockholm
Continent: Europe

Country: Egypt
Capital: Cairo
Continent: Africa

Country: Peru
Capital: Lima
Continent: South America

Country: Thailand
Capital: Bangkok
Continent: Asia

"""
COUNTRIES = ["France", "Japan", "Kenya", "Italy", "Chile", "Norway", "Vietnam", "Portugal"]


@agentrt.function
def describe(s, country: str):
    s += SHOTS
    s += f"Country: {country}\nCapital:"
    s += agentrt.gen("capital", max_tokens=6, stop="\n")
    s += "\nContinent:"
    s += agentrt.gen("continent", max_tokens=4, stop="\n")
    return s["capital"].strip(), s["continent"].strip()


def main() -> None:
    states = describe.run_batch([{"country": country} for country in COUNTRIES], temperature=0)
    prompt = reused = 0
    for country, state in zip(COUNTRIES, states, strict=True):
        print(f"{country:10} {state.ret_value[0]:12} {state.ret_value[1]}")
        totals = state.report().values["totals"]
        prompt, reused = prompt + totals["prompt_tokens"], reused + totals["cached_tokens"]
    print(f"{reused} of {prompt} prompt tokens reused")


if __name__ == "__main__":
    main()
