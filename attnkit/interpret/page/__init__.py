"""One self-contained HTML page of what a model looks at; `write_page` in page.py writes it."""
