//! Checks the tables of PROMISES.md: promises are numbered and short, and each has evidence that
//! exists.

use std::collections::BTreeSet;

const FILE: &str = "PROMISES.md";
/// The first cell of a header whose table contains promises. The columns are identifier, promise,
/// evidence, details.
const HEADER: &str = "id";
const PREFIX: &str = "P-";
/// Largest number of words in a promise.
const MOST_WORDS: usize = 30;

/// The errors of `document`. `names`: functions, modules and files.
pub fn wrong(document: &str, names: &BTreeSet<String>) -> Vec<String> {
    let promises = promises(document);
    let mut wrong = wrong_rows(&promises);
    if promises.is_empty() {
        wrong.push(format!("{FILE} has no table of promises"));
    }
    wrong.extend(missing_tests(document, names));
    wrong
}

/// The rows of all tables that begin with [`HEADER`], each as its cells.
fn promises(document: &str) -> Vec<Vec<&str>> {
    let mut rows = Vec::new();
    let mut is_of_promises = None;
    for line in document.lines() {
        if !line.starts_with('|') {
            is_of_promises = None;
            continue;
        }
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        if is_of_promises.is_none() {
            is_of_promises = Some(cells[0] == HEADER);
        } else if is_of_promises == Some(true) && !cells[0].starts_with("---") {
            rows.push(cells);
        }
    }
    rows
}

/// Errors in single rows: wrong numbers, long promises, and promises without evidence.
fn wrong_rows(promises: &[Vec<&str>]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for (at, cells) in promises.iter().enumerate() {
        let (id, expected) = (cells[0], format!("{PREFIX}{}", at + 1));
        let promise = cells.get(1).copied().unwrap_or_default();
        if id.is_empty() {
            wrong.push(format!("{FILE}: a promise has no identifier, expected {expected}: {promise:?}"));
        } else if !seen.insert(id) {
            wrong.push(format!("{FILE}: {id} stands there twice"));
        } else if id != expected {
            wrong.push(format!("{FILE}: {id} stands where {expected} is expected"));
        }
        let words = promise.split_whitespace().count();
        if words == 0 {
            wrong.push(format!("{FILE}: {id} promises nothing"));
        }
        if words > MOST_WORDS {
            wrong.push(format!("{FILE}: {id} has {words} words, more than {MOST_WORDS}"));
        }
        // A test or a command is written as code; words without code prove nothing.
        if !cells.get(2).is_some_and(|evidence| evidence.contains('`')) {
            wrong.push(format!("{FILE}: {id} names no test and no command as evidence"));
        }
    }
    wrong
}

/// Each name of a test or module that no source contains.
fn missing_tests(document: &str, names: &BTreeSet<String>) -> Vec<String> {
    let is_known =
        |part: &str| names.range(part.to_owned()..).next().is_some_and(|name| name.starts_with(part));
    let missing = paths(document).filter_map(|path| {
        let part = path.split("::").find(|part| !part.is_empty() && !is_known(part))?;
        Some(format!("{FILE} names `{path}` as evidence, and no source has `{part}`"))
    });
    missing.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Text between backticks that has the form `module::test`, or begins like it.
fn paths(document: &str) -> impl Iterator<Item = &str> {
    let is_of_path = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | ':');
    let code = document.split('`').skip(1).step_by(2);
    let words = code.flat_map(move |code| code.split(move |c: char| !is_of_path(c)));
    words.filter(|word| word.contains("::") && !word.starts_with("sterna_") && !word.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The errors of a document with these rows, if every test exists.
    fn wrong_with(rows: &[&str]) -> Vec<String> {
        let legend = "| evidence | is |\n| --- | --- |\n| `engine` | tests |\n\n";
        let head = "| id | promise | evidence | details |\n| --- | --- | --- | --- |\n";
        wrong(&format!("{legend}{head}{}\n", rows.join("\n")), &["tls".to_owned()].into())
    }

    fn row(id: &str, promise: &str) -> String {
        format!("| {id} | {promise} | `engine tls::` | |")
    }

    #[test]
    fn evidence_that_does_not_exist_is_named() {
        let names = ["tls", "slow_handshake_has_the_setup_limit", "panics"].map(str::to_owned).into();
        let document = "| a | `engine tls::slow_handshake`, `leaks panics::`, `sterna_x::y::z` |\n| b | `cargo test -p x --test engine tls::gone` |";

        let wrong = missing_tests(document, &names);

        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert!(wrong[0].contains("`tls::gone`") && wrong[0].contains("no source has `gone`"), "{wrong:?}");
    }

    #[test]
    fn numbered_short_promises_with_evidence_are_right() {
        let longest = ["word"; 30].join(" ");

        let wrong = wrong_with(&[
            &row("P-1", &longest),
            "\n## B\n\n| id | promise | evidence |\n| --- | --- | --- |\n| P-2 | b | `soak` |",
        ]);

        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn promise_of_more_than_thirty_words_is_refused() {
        let wrong = wrong_with(&[&row("P-1", &["word"; 31].join(" "))]);

        assert_eq!(wrong, ["PROMISES.md: P-1 has 31 words, more than 30"]);
    }

    #[test]
    fn identifiers_that_are_missing_doubled_or_out_of_order_are_refused() {
        assert!(wrong_with(&[&row("", "a")])[0].contains("no identifier, expected P-1"));
        assert_eq!(
            wrong_with(&[&row("P-1", "a"), &row("P-1", "b")]),
            ["PROMISES.md: P-1 stands there twice"]
        );
        assert_eq!(
            wrong_with(&[&row("P-1", "a"), &row("P-3", "b")]),
            ["PROMISES.md: P-3 stands where P-2 is expected"]
        );
        assert_eq!(wrong_with(&[&row("first", "a")]), ["PROMISES.md: first stands where P-1 is expected"]);
    }

    #[test]
    fn promise_without_evidence_or_without_words_is_refused() {
        let none = "PROMISES.md: P-1 names no test and no command as evidence";
        assert_eq!(wrong_with(&["| P-1 | a | | |"]), [none]);
        assert_eq!(wrong_with(&["| P-1 | a | tests exist | |"]), [none]);
        assert_eq!(wrong_with(&["| P-1 | a |"]), [none]);
        assert_eq!(wrong_with(&[&row("P-1", "")]), ["PROMISES.md: P-1 promises nothing"]);
    }

    #[test]
    fn document_without_promises_is_refused() {
        assert_eq!(wrong("# Promises\n", &BTreeSet::new()), ["PROMISES.md has no table of promises"]);
    }
}
