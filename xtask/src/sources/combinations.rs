//! Checks that the tables of docs/combinations.md agree. Each pair that the first table marks as
//! refused or tested must be in the second or third table, and vice versa. Each named test must
//! exist.

use std::collections::{BTreeMap, BTreeSet};

const FILE: &str = "docs/combinations.md";
/// Parts of postcopy, which refuse everything that postcopy refuses.
const PARTS_OF_POSTCOPY: [&str; 3] = ["preempt", "lanes", "recovery"];
const MARKS: [&str; 4] = ["T", "+", "x", "."];

/// Two features in alphabetical order.
type Pair = (String, String);

fn pair(one: &str, other: &str) -> Pair {
    let (one, other) = if one < other { (one, other) } else { (other, one) };
    (one.to_owned(), other.to_owned())
}

/// The errors of `document`. `has_test`: whether a test, or a module of tests, has this name.
pub fn wrong(document: &str, has_test: impl Fn(&str) -> bool) -> Vec<String> {
    let mut wrong = Vec::new();
    let (features, marks) = matrix(document, &mut wrong);
    let (refused, tested) =
        (refused(document, &features, &mut wrong), tested(document, &features, &mut wrong));
    for (pair, mark) in &marks {
        let (one, other) = pair;
        let expected = [("x", refused.contains(pair)), ("T", tested.contains(pair))];
        for (what, is_listed) in expected {
            if (mark == what) != is_listed {
                let listed = if is_listed { "is" } else { "is not" };
                wrong.push(format!(
                    "{FILE}: {one} with {other} is marked {mark:?} and {listed} in the table of {what:?}"
                ));
            }
        }
        if !MARKS.contains(&mark.as_str()) {
            wrong.push(format!("{FILE}: {one} with {other} is marked {mark:?}, which means nothing"));
        }
    }
    for name in tests(document) {
        if !has_test(&name) {
            wrong.push(format!("{FILE}: there is no test {name:?}"));
        }
    }
    wrong
}

fn cells(line: &str) -> Vec<&str> {
    line.trim().trim_matches('|').split('|').map(str::trim).collect()
}

fn section<'a>(document: &'a str, title: &str) -> impl Iterator<Item = &'a str> {
    let heading = format!("## {title}");
    let lines = document.lines().skip_while(move |line| *line != heading).skip(1);
    lines.take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with('|'))
}

/// The first table: features in order, and the mark of each pair.
fn matrix(document: &str, wrong: &mut Vec<String>) -> (Vec<String>, BTreeMap<Pair, String>) {
    let rows: Vec<_> = section(document, "Pairs").map(cells).filter(|row| row.contains(&"=")).collect();
    let name = |row: &Vec<&str>| row[0].rsplit_once(" (").map_or(row[0], |(name, _)| name).to_owned();
    let features: Vec<_> = rows.iter().map(name).collect();
    if features.is_empty() {
        wrong.push(format!("{FILE} has no pairs"));
    }
    let mut marks = BTreeMap::new();
    for (at, row) in rows.iter().enumerate() {
        for (before, mark) in row.iter().skip(1).take(at).enumerate() {
            marks.insert(pair(&features[at], &features[before]), (*mark).to_owned());
        }
    }
    (features, marks)
}

/// The second table. Rows have four columns: feature, feature or "all others", words, test.
fn refused(document: &str, features: &[String], wrong: &mut Vec<String>) -> BTreeSet<Pair> {
    let mut refused = BTreeSet::new();
    for row in section(document, "Refused").map(cells).filter(|row| row.len() == 4).skip(2) {
        let (one, other) = (row[0], row[1]);
        let others: Vec<&str> = match other {
            "all others" => features.iter().map(String::as_str).filter(|other| *other != one).collect(),
            other => vec![other],
        };
        for name in others.iter().chain([&one]) {
            if !features.iter().any(|known| known == name) {
                wrong.push(format!("{FILE}: {name:?} is refused and is no feature of the first table"));
            }
        }
        refused.extend(others.iter().map(|other| pair(one, other)));
    }
    let whole: Vec<_> =
        refused.iter().filter(|(one, other)| one == "postcopy" || other == "postcopy").cloned().collect();
    for (one, other) in whole {
        let other = if one == "postcopy" { other } else { one };
        let parts = PARTS_OF_POSTCOPY.iter().filter(|part| **part != other);
        refused.extend(parts.map(|part| pair(part, &other)));
    }
    refused
}

/// The third table. Rows have two columns: features, test. Names of features may contain commas.
fn tested(document: &str, features: &[String], wrong: &mut Vec<String>) -> BTreeSet<Pair> {
    let mut tested = BTreeSet::new();
    for row in section(document, "Tested together").map(cells).skip(2) {
        let padded = format!(", {}, ", row[0]);
        let used: Vec<_> =
            features.iter().filter(|feature| padded.contains(&format!(", {feature}, "))).collect();
        let length: usize = used.iter().map(|feature| feature.len() + 2).sum();
        if length != padded.len() - 2 {
            wrong.push(format!("{FILE}: {:?} names something that is no feature of the first table", row[0]));
        }
        for (at, one) in used.iter().enumerate() {
            tested.extend(used[..at].iter().map(|other| pair(one, other)));
        }
    }
    tested
}

/// Names of tests, without their modules.
fn tests(document: &str) -> BTreeSet<String> {
    let code = document.split('`').skip(1).step_by(2).filter(|code| code.contains("::"));
    code.filter_map(|code| code.rsplit("::").next()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::wrong;

    const SOUND: &str = "## Pairs\n| a (a) | = | | |\n| b, c (b) | x | = | |\n| postcopy (p) | T | + | = |\n\
        ## Refused\n| f | w | s | c |\n| - | - | - | - |\n| a | b, c | no | `engine t::one` |\n\
        ## Tested together\n| f | t |\n| - | - |\n| a, postcopy | `engine t::two` |\n";

    #[test]
    fn tables_that_agree_are_sound_and_each_difference_is_told() {
        let has = |name: &str| ["one", "two"].contains(&name);
        assert_eq!(wrong(SOUND, has), Vec::<String>::new());
        for (from, to, says) in [
            ("| x | = |", "| + | = |", "b, c is marked \"+\" and is in the table of \"x\""),
            ("| T | + |", "| x | + |", "postcopy is marked \"x\" and is not in the table of \"x\""),
            ("| T | + |", "| T | T |", "is marked \"T\" and is not in the table of \"T\""),
            ("| T | + |", "| T | ? |", "means nothing"),
            ("a, postcopy", "a, precopy", "no feature"),
            ("| a | b, c | no", "| a | d | no", "no feature"),
            ("t::two", "t::three", "no test \"three\""),
        ] {
            let told = wrong(&SOUND.replace(from, to), has).join("; ");
            assert!(told.contains(says), "{to}: {told}");
        }
    }
}
