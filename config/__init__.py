"""Configuration: schema, strict TOML files, command line, rules between keys, model shapes. Imports no torch."""
