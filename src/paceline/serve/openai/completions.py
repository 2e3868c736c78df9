"""The answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.engine.request import TokenLogprob
from paceline.serve.jobs import Update
from paceline.serve.openai.answer_parts import Answer, Choice, finite


class CompletionAnswer(Answer):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def finished(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        entries = [*self._prompt(choice), *choice.logprobs]
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, entries),
            **self.ends_with(choice),
            **self.prompt_logprobs(choice),
            **self.token_ids(choice.tokens),
            **self.prompt_token_ids(choice),
        }

    def deltas(self, index: int, update: Update, text: str) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        first = choice.updates == 1
        entries = [*(self._prompt(choice) if first else ()), *update.logprobs]
        end = self.ends_with(choice) if update.ending is not None else {"finish_reason": None, "stop_reason": None}
        yield {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(choice, entries),
            **end,
            **(self.prompt_logprobs(choice) if update.prompt_logprobs is not None else {}),
            **self.token_ids(update.tokens),
            **(self.prompt_token_ids(choice) if first else {}),
        }

    def _prompt(self, choice: Choice) -> Sequence[TokenLogprob | None]:
        """Return the log-probabilities of the prompt if the answer repeats it. The prompt's first choice has them."""
        if not self.plan.body.echo or self.plan.body.logprobs is None:
            return ()
        return self.of_prompt(choice).prompt_logprobs or ()

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        """Return OpenAI's four lists. The first token of a prompt has no log-probability. The offset of a token is the
        length of the tokens before it, so it does not depend on the division of a stream into updates."""
        if self.plan.body.logprobs is None:
            return None
        offsets, names = list[int](), list[str]()
        begin = self.plan.prompts[choice.prompt][0]
        for entry in entries:
            name = self.token_text(begin if entry is None else entry.token)
            offsets.append(choice.offset)
            names.append(name)
            choice.offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else finite(entry.raw) for entry in entries],
            "tokens": names,
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one by text. Of tokens with equal texts, the likeliest counts."""
        found: dict[str, float] = {}
        for token, value in [*entry.top_raw[: self.plan.body.logprobs], (entry.token, entry.raw)]:
            found.setdefault(self.token_text(token), finite(value))
        return found
