"""Serving: an engine that any thread may use, and an HTTP server in the protocol that most clients speak.

Read `open_engine`, which needs nothing but the library. The rest needs the extra `serve`: `app` has the routes.
"""
