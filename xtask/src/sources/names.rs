//! Sterna's own names on the monitor (`x-sterna-…`, `X_STERNA_…`): each one that a source has is in docs/qmp.md.
//!
//! That page is generated from the declarations, so a name that it lacks is declared nowhere.

use std::collections::BTreeSet;

const FILE: &str = "docs/qmp.md";
const PREFIXES: [&str; 2] = ["x-sterna-", "X_STERNA_"];

/// Each of `names` that `document` lacks.
pub fn wrong(document: &str, names: &BTreeSet<String>) -> Vec<String> {
    let known: BTreeSet<String> = own_names(document).collect();
    let missing = names.difference(&known);
    missing.map(|name| format!("{FILE} has no {name}: declare it in crates/sterna-qmp")).collect()
}

/// Sterna's own names in `text`.
pub fn own_names(text: &str) -> impl Iterator<Item = String> {
    PREFIXES.into_iter().flat_map(move |prefix| {
        text.match_indices(prefix).filter_map(move |(at, _)| {
            let is_upper = prefix.starts_with('X');
            let is_of_name = |c: char| match is_upper {
                true => c.is_ascii_uppercase() || c == '_',
                false => c.is_ascii_lowercase() || c == '-',
            };
            let rest = &text[at + prefix.len()..];
            let end = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
            let tail = rest[..end].trim_end_matches(['-', '_']);
            (!tail.is_empty()).then(|| format!("{prefix}{tail}"))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_found_whole_and_prefixes_alone_are_none() {
        let text = "`x-sterna-hold`, x-sterna-*, \"X_STERNA_WARNING\", x-sterna-force. X_STERNA_";

        let found: Vec<_> = own_names(text).collect();

        assert_eq!(found, ["x-sterna-hold", "x-sterna-force", "X_STERNA_WARNING"]);
    }

    #[test]
    fn name_that_the_page_lacks_is_wrong_even_if_a_longer_one_is_there() {
        let names = ["x-sterna-postcopy-after".to_owned()].into();

        assert_eq!(wrong("| `x-sterna-postcopy-after-rounds` |", &names).len(), 1);
        assert!(wrong("| `x-sterna-postcopy-after` |", &names).is_empty());
    }
}
