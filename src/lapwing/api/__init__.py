"""The public functions.

Strings and objects of the user are converted to objects of the library here, and only here.
"""
