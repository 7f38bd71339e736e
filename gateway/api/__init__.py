"""Messages of the public routes. They validate requests, and openapi.json is generated from them."""
