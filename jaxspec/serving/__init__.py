"""Serving: an engine for requests from many threads, and an HTTP server in the OpenAI protocol.

| Step of a request | File |
|---|---|
| route, body | `app` |
| id, key, log | `middleware` |
| JSON to a checked body | `protocol` |
| body to requests of the engine | `parse_request`, with `structured_outputs` |
| requests and their outputs | `open_engine`, `handle` |
| calls to the engines of other processes | `processes`, with `reply_end` |
| outputs to a reply | `completions` or `responses`, with `reply_format` |
| a client that disconnects | `disconnect`, `event_stream` |

`open_engine` and `handle` need the library only; the rest needs the extra `serve`.
"""
