"""`trainer gateway`: an HTTP server between any agent harness and an engine, which records the exact tokens.

```text
harness --> server --> apis.{chat, anthropic, responses} --> session --> trainer.tokens --> SGLang's /generate
                                                                |
                                                                +--> record: rows of finished sessions
```

A session is one episode of a harness. Its requests become rows of token ids that only grow: a request that extends the
recorded messages is appended to the engine's own sampled ids, and any other begins a new row.
"""
