//! A Sterna in a process of its own: this program started again in the tree, or running in the other VM.
//! Orders and answers are lines of JSON.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::Failure;

/// The parent's handle to such a process, which is killed when this is dropped.
pub(super) struct Sterna {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Sterna {
    /// Starts the process. `part` is the argument that selects its work.
    pub(super) fn start(part: &str) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        let mut process = command
            .arg(part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("a Sterna: {error}"))?;
        let orders = process.stdin.take().ok_or("no standard input")?;
        let answers = BufReader::new(process.stdout.take().ok_or("no standard output")?);
        Ok(Self { process, orders, answers })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends an order and waits for its answer.
    pub(super) fn ask(&mut self, order: &Value) -> Result<Value, Failure> {
        ask(&mut self.orders, &mut self.answers, order)
    }
}

impl Drop for Sterna {
    fn drop(&mut self) {
        // Errors mean that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends an order over any stream and waits for its answer.
pub(super) fn ask(
    orders: &mut impl std::io::Write,
    answers: &mut impl BufRead,
    order: &Value,
) -> Result<Value, Failure> {
    writeln!(orders, "{order}").map_err(|error| format!("a Sterna: {error}"))?;
    let mut line = String::new();
    answers.read_line(&mut line).map_err(|error| format!("a Sterna: {error}"))?;
    let answer: Value =
        serde_json::from_str(&line).map_err(|error| format!("a Sterna said {line:?}: {error}"))?;
    match answer["error"].as_str() {
        None => Ok(answer),
        Some(why) => Err(why.to_owned()),
    }
}

/// Runs the process: performs orders from standard input until its end.
pub(super) fn serve(perform: impl FnMut(&Value) -> Result<Value, Failure>) {
    serve_over(std::io::stdin().lock(), &mut std::io::stdout(), perform);
}

/// Performs orders until the end of the input, or until an answer cannot be sent.
pub(super) fn serve_over(
    orders: impl BufRead,
    answers: &mut impl std::io::Write,
    mut perform: impl FnMut(&Value) -> Result<Value, Failure>,
) {
    for line in orders.lines().map_while(Result::ok) {
        let answer = serde_json::from_str(&line)
            .map_err(|error| error.to_string())
            .and_then(|order: Value| perform(&order))
            .unwrap_or_else(|why| json!({ "error": why }));
        if writeln!(answers, "{answer}").and_then(|()| answers.flush()).is_err() {
            return;
        }
    }
}
