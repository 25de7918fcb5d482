from recipe_utils.long_rows.exchange import row_groups as row_groups
