"""The messages of the public routes. They check requests, and openapi.json is made from them."""
