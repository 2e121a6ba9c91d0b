"""agent: {prompt: "my_prompt:Terse"}."""


class Terse:
    """The shortest prompt with which a tuned model works."""

    def system(self, *, shown: str, max_turns: int, instructions: str) -> str:
        """Return the system message; `instructions` are the grammar's and the tools'."""
        return f"You use a computer. After each reply you see {shown}. {max_turns} replies.\n\n{instructions}"

    def task(self, instruction: str) -> str:
        """Return the text next to the first screenshot."""
        return f"Goal: {instruction}"
