//! SPDX licence expressions: decides whether a program under an expression may be used.
//!
//! Grammar (SPDX 2.3, annex D), as far as crates use it: identifiers, `WITH exception`, `AND`,
//! `OR`, parentheses. AND binds closer than OR. Old crates write `/` for OR. An exception only adds
//! permissions, so `X WITH Y` is allowed where X is allowed.

/// Whether `expression` offers a choice of licences that are all in `allow`.
///
/// An expression that cannot be parsed is an error with the reason.
pub fn allowed(expression: &str, allow: &[&str]) -> Result<bool, String> {
    let tokens = tokens(expression)?;
    let mut parser = Parser { tokens: &tokens, allow };
    let verdict = parser.or()?;
    match parser.tokens.first() {
        None => Ok(verdict),
        Some(rest) => Err(format!("`{expression}`: unexpected `{rest}`")),
    }
}

fn tokens(expression: &str) -> Result<Vec<String>, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    for token in spaced.split_whitespace() {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | ':' | '(' | ')');
        if !token.chars().all(good) {
            return Err(format!("`{expression}`: `{token}` is not SPDX"));
        }
    }
    Ok(spaced.split_whitespace().map(str::to_owned).collect())
}

struct Parser<'a> {
    tokens: &'a [String],
    allow: &'a [&'a str],
}

impl<'a> Parser<'a> {
    fn or(&mut self) -> Result<bool, String> {
        let mut verdict = self.and()?;
        while self.take("OR") {
            verdict |= self.and()?;
        }
        Ok(verdict)
    }

    fn and(&mut self) -> Result<bool, String> {
        let mut verdict = self.licence()?;
        while self.take("AND") {
            verdict &= self.licence()?;
        }
        Ok(verdict)
    }

    fn licence(&mut self) -> Result<bool, String> {
        if self.take("(") {
            let verdict = self.or()?;
            return if self.take(")") { Ok(verdict) } else { Err("a `(` without its `)`".into()) };
        }
        let name = self.next().ok_or("it ends where a licence should stand")?;
        if matches!(name, "OR" | "AND" | "WITH" | ")") {
            return Err(format!("`{name}` stands where a licence should"));
        }
        let verdict = self.allow.contains(&name);
        if self.take("WITH") {
            self.next().ok_or("it ends where an exception should stand")?;
        }
        Ok(verdict)
    }

    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.tokens.first().is_some_and(|first| first == token);
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(expression: &str) -> Result<bool, String> {
        allowed(expression, &["Apache-2.0", "MIT", "Unicode-3.0"])
    }

    #[test]
    fn allowed_or_needs_one_side() {
        assert_eq!(verdict("MIT"), Ok(true));
        assert_eq!(verdict("GPL-2.0"), Ok(false));
        assert_eq!(verdict("MIT OR LGPL-2.1-or-later"), Ok(true));
        assert_eq!(verdict("GPL-2.0 OR LGPL-2.1"), Ok(false));
        assert_eq!(verdict("MIT/Apache-2.0"), Ok(true));
    }

    #[test]
    fn allowed_and_needs_both_sides_and_binds_closer() {
        assert_eq!(verdict("(MIT OR GPL-2.0) AND Unicode-3.0"), Ok(true));
        assert_eq!(verdict("MIT AND GPL-2.0"), Ok(false));
        assert_eq!(verdict("MIT OR MIT AND GPL-2.0"), Ok(true));
        assert_eq!(verdict("(MIT OR MIT) AND GPL-2.0"), Ok(false));
    }

    #[test]
    fn allowed_with_an_exception_goes_by_its_licence() {
        assert_eq!(verdict("Apache-2.0 WITH LLVM-exception OR GPL-2.0"), Ok(true));
        assert_eq!(verdict("GPL-2.0 WITH Classpath-exception-2.0"), Ok(false));
    }

    #[test]
    fn allowed_of_a_broken_expression_is_an_error() {
        for broken in ["", "MIT OR", "(MIT", "MIT)", "OR MIT", "MIT MIT", "MIT & GPL", "MIT WITH"] {
            assert!(verdict(broken).is_err(), "{broken}");
        }
    }
}
