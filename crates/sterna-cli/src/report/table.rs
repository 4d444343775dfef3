//! HTML tables. On a narrow page, each row becomes a block with a name before each value, so that nothing is
//! cut off.

use std::fmt::Write;

use super::svg::escape;

/// A table with a head.
pub struct Table {
    head: Vec<String>,
    /// Columns with text, which may wrap; numbers do not.
    words: Vec<usize>,
    rows: String,
}

impl Table {
    /// Begins a table with these columns.
    pub fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|name| escape(name)).collect(), words: Vec::new(), rows: String::new() }
    }

    /// Marks the column at `index` as text.
    pub fn with_words(mut self, index: usize) -> Self {
        self.words.push(index);
        self
    }

    /// Adds a row and escapes its text.
    pub fn row<'a>(&mut self, cells: impl IntoIterator<Item = &'a str>) {
        self.rows.push_str("<tr>");
        for (index, cell) in cells.into_iter().enumerate() {
            let name = self.head.get(index).map_or("", String::as_str);
            let class = if self.words.contains(&index) { " class=\"words\"" } else { "" };
            let _ = write!(self.rows, "<td{class} data-name=\"{name}\">{}</td>", escape(cell));
        }
        self.rows.push_str("</tr>\n");
    }

    /// The HTML element; empty without rows.
    pub fn finish(self) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let cell = |(index, name): (usize, &String)| match self.words.contains(&index) {
            true => format!("<th class=\"words\">{name}</th>"),
            false => format!("<th>{name}</th>"),
        };
        let head: String = self.head.iter().enumerate().map(cell).collect();
        format!(
            "<table class=\"rows\">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{}</tbody>\n</table>\n",
            self.rows
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cell_has_its_columns_name_and_is_escaped() {
        let mut table = Table::new(&["lost", "why"]).with_words(1);
        table.row(["2 s", "<b>"]);

        let html = table.finish();

        assert!(
            html.contains(
                "<td data-name=\"lost\">2 s</td><td class=\"words\" data-name=\"why\">&lt;b&gt;</td>"
            ),
            "{html}"
        );
        assert!(Table::new(&["lost"]).finish().is_empty());
    }
}
