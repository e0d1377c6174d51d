"""The table, the page and the pictures of a sweep."""
