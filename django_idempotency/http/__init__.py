"""The layer between the entry points and the engine: everything that knows requests and
responses.
"""
