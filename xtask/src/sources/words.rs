//! Words that the writing style of CONTRIBUTING.md bans: in comments, in texts for users, and in documents.
//!
//! Only words that are wrong in every sense are listed. A word with a second, legitimate sense ("behind" a proxy, "beside" a file) is
//! left to reviewers.

/// Banned, with what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("nobody", "name who does not: no thread, no other process, no client"),
    ("whoever", "name who does: the caller, a new connection, the operator"),
    ("anew", "again, or connect again, allocate again"),
    ("for ever", "without end, or without limit"),
    ("for good", "permanently, or until the process ends"),
    ("such a one", "repeat the noun"),
    ("stands still", "is paused, or is stopped"),
    ("stand still", "be paused, or do not change"),
    ("says so", "name the message, the error or the event"),
    ("goes on", "continues"),
    ("go on", "continue"),
    ("somebody", "name who does: another process, another client of the monitor, another user"),
    ("anybody", "any client, any process, any user"),
    ("everybody", "every client, every process"),
    ("by hand", "name who does: the operator, you"),
    ("stands for", "means, or is the name of"),
    ("as ever", "leave it out"),
    ("mends", "repairs"),
];

/// The comments and texts of a Rust file that contain a banned word. `code spans` do not count, here and in documents.
///
/// Comments of clap's structures are the text of `--help`. Texts are checked in the crates, without their tests.
pub fn in_source(name: &str, text: &str) -> Vec<String> {
    if name.ends_with("sources/words.rs") {
        return Vec::new();
    }
    let comments = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//"));
    let mut wrong: Vec<_> = comments.filter_map(|(at, line)| banned(name, at, &without_code(line))).collect();
    if has_texts_for_users(name) {
        // A single word is a name, and no text.
        let texts = literals(text).into_iter().filter(|(_, text)| text.contains(' '));
        wrong.extend(texts.filter_map(|(at, text)| banned(name, at, &without_code(&text))));
    }
    wrong
}

fn has_texts_for_users(name: &str) -> bool {
    name.starts_with("crates/")
        && name.contains("/src/")
        && !name.contains("/tests/")
        && !name.ends_with("/tests.rs")
}

/// The string literals before the unit tests, each with the index of its first line.
fn literals(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let (mut rest, mut line) = (text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default(), 0);
    while let Some(at) = rest.find(['"', '/', '\'']) {
        line += rest[..at].matches('\n').count();
        let (before, here) = rest.split_at(at);
        let end = match here.as_bytes()[0] {
            b'/' if here.starts_with("//") => here.find('\n').unwrap_or(here.len()),
            b'"' => {
                let end = end_of_literal(before, here);
                found.push((line, unbroken(&here[1..end])));
                end
            }
            // A character, and not a lifetime.
            b'\'' if here.starts_with("'\"'") => 3,
            b'\'' if here.starts_with("'\\") => 4,
            _ => 1,
        };
        line += here[..end].matches('\n').count();
        rest = &here[end..];
    }
    found
}

/// The index after the closing quote of the literal with which `here` begins. `before` ends in `r` or `r#` if it is a raw literal.
fn end_of_literal(before: &str, here: &str) -> usize {
    let bare = before.trim_end_matches('#');
    let hashes = &before[bare.len()..];
    let is_raw = bare.ends_with('r') && !bare[..bare.len() - 1].ends_with(char::is_alphanumeric);
    if is_raw {
        let close = format!("\"{hashes}");
        return here[1..].find(&close).map_or(here.len(), |at| 1 + at + close.len());
    }
    let mut is_escaped = false;
    let close = here[1..].find(|c| {
        let closes = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        closes
    });
    close.map_or(here.len(), |at| at + 2)
}

/// The text of a literal that continues over several lines of source.
fn unbroken(literal: &str) -> String {
    let mut parts = literal.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

/// The lines of a document that contain a banned word.
pub fn in_document(name: &str, text: &str) -> Vec<String> {
    text.lines().enumerate().filter_map(|(at, line)| banned(name, at, &without_code(line))).collect()
}

fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

fn banned(name: &str, at: usize, line: &str) -> Option<String> {
    let line = line.to_lowercase();
    let (word, better) = BANNED.iter().find(|(word, _)| super::has_word(&line, word))?;
    Some(format!("{name}:{} says \"{word}\" (CONTRIBUTING.md, Writing style): {better}", at + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_word_in_a_comment_is_wrong_and_in_code_is_not() {
        let text = "/// Nobody waits.\nlet nobody = 1;\n// Renewed.\n";

        let wrong = in_source("crates/sterna-ram/src/lib.rs", text);

        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].starts_with("crates/sterna-ram/src/lib.rs:1 says \"nobody\""), "{wrong:?}");
    }

    #[test]
    fn banned_word_in_a_text_for_users_is_wrong_also_over_two_lines() {
        let text = "let c = '\"';\nlet a = \"the guest goes \\\n    on \\\" here\";\nlet b = r#\"it \"stands still\"#;\n";

        let wrong = in_source("crates/sterna-ram/src/lib.rs", text);

        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].starts_with("crates/sterna-ram/src/lib.rs:2 says \"goes on\""), "{wrong:?}");
        assert!(wrong[1].starts_with("crates/sterna-ram/src/lib.rs:4 says \"stands still\""), "{wrong:?}");
    }

    #[test]
    fn texts_of_tests_are_not_for_users() {
        let text = "const A: &str = \"goes off\";\n\n#[cfg(test)]\nmod tests {\n    const B: &str = \"goes on\";\n}\n";

        assert!(in_source("crates/sterna-ram/src/lib.rs", text).is_empty());
        assert!(in_source("crates/sterna-ram/tests/memory/a.rs", "let a = \"goes on\";").is_empty());
        assert!(in_source("crates/sterna-ram/src/a/tests.rs", "let a = \"goes on\";").is_empty());
    }

    #[test]
    fn code_spans_of_a_document_do_not_count() {
        assert!(in_document("docs/cli.md", "the user `nobody`").is_empty());
        assert_eq!(in_document("docs/cli.md", "it stands still").len(), 1);
    }
}
