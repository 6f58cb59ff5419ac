"""An OpenAI-compatible endpoint in front of an engine, which records the token ids of every conversation.

- `requests`, `messages`: from JSON to a checked request; nothing that would change meaning is passed over
- `conversations`: what was said so far, as the ids that were sampled; longer histories go on from them
- `session`: one caller's conversations, and how a request becomes turns
- `voices`: where turns are sampled: by an engine (`temper serve`), or as those of a sample in a run
- `endpoint`: the HTTP application, its keys and metrics

Errors: `rl.serve.errors.ApiError`, in the shape that OpenAI's clients read.
"""
