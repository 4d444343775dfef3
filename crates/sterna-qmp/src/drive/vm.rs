//! One VM's monitor with typed questions.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::{Value, json};

use super::error::DriveError;
use super::progress::Progress;
use crate::client::{Client, ClientError, Endpoint, QmpEvent};

/// How long an answer may take. Commands answer at once; only a machine in trouble needs longer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A negotiated connection to a VM's monitor.
pub struct Vm {
    client: Client,
    at: String,
}

/// A RAM block as the machine has it (`info ramblock`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineBlock {
    /// As in the stream (specs/mapped-ram.md §2.2).
    pub name: String,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes to which it can grow; equal to the bytes in use for most.
    pub most_bytes: u64,
}

impl Vm {
    /// Connects to the monitor at `endpoint`.
    pub fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        Ok(Self::new(Client::connect(endpoint, ANSWER_LIMIT)?, endpoint.to_string()))
    }

    /// As [`connect`](Self::connect), with out-of-band execution where the monitor has it.
    pub fn connect_oob(endpoint: &Endpoint) -> Result<Self, ClientError> {
        Ok(Self::new(Client::connect_oob(endpoint, ANSWER_LIMIT)?, endpoint.to_string()))
    }

    /// Takes a connection over; `at` is its name in sentences.
    pub fn new(client: Client, at: impl Into<String>) -> Self {
        Self { client, at: at.into() }
    }

    /// Its name in sentences: where its monitor is.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// The connection itself.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Whether Sterna's VMM answers.
    pub fn is_sterna(&self) -> bool {
        self.client.is_sterna()
    }

    /// The monitor's version in words.
    pub fn version(&self) -> String {
        let version = self.client.version();
        let qemu = &version["qemu"];
        let number = |name: &str| qemu[name].as_u64().unwrap_or(0);
        let numbers = format!("QEMU {}.{}.{}", number("major"), number("minor"), number("micro"));
        match version["package"].as_str() {
            Some(package) if self.is_sterna() => format!("{package} (speaks as {numbers})"),
            Some(package) if !package.is_empty() => format!("{numbers} ({package})"),
            _ => numbers,
        }
    }

    /// Executes a command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, DriveError> {
        self.try_execute(command, arguments).map_err(|error| self.error(error))
    }

    /// Executes a command whose refusal means something to the caller.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.client.execute(command, arguments)
    }

    /// `migrate-recover`: a VM whose postcopy is paused listens again. It answers even if the guest's machine stands still.
    pub fn migrate_recover(&mut self, uri: &str) -> Result<(), ClientError> {
        self.client.execute_oob("migrate-recover", json!({ "uri": uri })).map(drop)
    }

    /// `migrate-incoming`. A VM that can stays to say why it failed.
    pub fn migrate_incoming(&mut self, uri: &str) -> Result<(), DriveError> {
        let stays = json!({ "uri": uri, "exit-on-error": false });
        match self.try_execute("migrate-incoming", stays) {
            // A QEMU of before 9.1 knows no such argument, and ends with its reason on its standard error.
            Err(ClientError::Refused { desc, .. }) if desc.contains("'exit-on-error' is unexpected") => {
                self.execute("migrate-incoming", json!({ "uri": uri })).map(drop)
            }
            answer => answer.map(drop).map_err(|error| self.error(error)),
        }
    }

    /// The next event within `limit`.
    pub fn next_event(&mut self, limit: Duration) -> Result<Option<QmpEvent>, DriveError> {
        self.client.next_event(limit).map_err(|error| self.error(error))
    }

    /// `query-status`'s word.
    pub fn run_state(&mut self) -> Result<String, DriveError> {
        Ok(text(&self.execute("query-status", Value::Null)?["status"]))
    }

    /// `query-migrate`.
    pub fn progress(&mut self) -> Result<Progress, DriveError> {
        Ok(Progress::from_query(&self.execute("query-migrate", Value::Null)?))
    }

    /// The machine type with its version, as it stands in the stream (specs/stream.md §1.2).
    pub fn machine_type(&mut self) -> Result<String, DriveError> {
        if self.is_sterna() {
            return Ok(text(&self.execute("query-machines", Value::Null)?[0]["name"]));
        }
        let class = self.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
        let class = text(&class);
        Ok(class.strip_suffix("-machine").unwrap_or(&class).to_owned())
    }

    /// The machine's RAM blocks; none if the monitor cannot say.
    pub fn blocks(&mut self) -> Result<Option<Vec<MachineBlock>>, DriveError> {
        match self.client.human("info ramblock") {
            Ok(table) => Ok(parse_blocks(&table)),
            Err(ClientError::Refused { .. }) => Ok(None),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Puts `fd` into the descriptor set `set`, or a new one, whose number it gives back (`/dev/fdset/N`).
    pub fn add_fd(&mut self, set: Option<u64>, fd: BorrowedFd<'_>, what: &str) -> Result<u64, DriveError> {
        let mut arguments = json!({ "opaque": what });
        if let Some(set) = set {
            arguments["fdset-id"] = set.into();
        }
        self.check_takes_descriptors()?;
        let answer =
            self.client.execute_with_fd("add-fd", arguments, fd).map_err(|error| self.error(error))?;
        answer["fdset-id"].as_u64().ok_or_else(|| {
            self.error(ClientError::Protocol(format!("add-fd returned {answer}, without a number")))
        })
    }

    /// Gives `fd` to the VM under `name` (`fd:NAME`).
    pub fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), DriveError> {
        self.check_takes_descriptors()?;
        self.client.send_fd(name, fd).map_err(|error| self.error(error))
    }

    fn check_takes_descriptors(&self) -> Result<(), DriveError> {
        if self.at.starts_with("tcp:") {
            return Err(DriveError::Unfit(format!(
                "files are passed to the VM as descriptors, which {} cannot carry: name a unix socket of its \
                 monitor, on this machine",
                self.at
            )));
        }
        Ok(())
    }

    pub(super) fn error(&self, error: ClientError) -> DriveError {
        DriveError::Monitor { at: self.at.clone(), error }
    }
}

/// Reads the table of `info ramblock`: name, page size with its unit, offset, used, total, and what newer
/// versions add behind. None if it is no such table.
fn parse_blocks(table: &str) -> Option<Vec<MachineBlock>> {
    let mut lines = table.lines();
    lines.next().filter(|head| head.contains("Block Name") && head.contains("Total"))?;
    lines.filter(|line| !line.trim().is_empty()).map(parse_block).collect()
}

fn parse_block(line: &str) -> Option<MachineBlock> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // Names may hold spaces, so look for the unit and count from there.
    let unit = words.iter().position(|word| matches!(*word, "B" | "KiB" | "MiB" | "GiB"))?;
    let name = words.get(..unit.checked_sub(1)?)?.join(" ");
    let number = |at: usize| u64::from_str_radix(words.get(at)?.strip_prefix("0x")?, 16).ok();
    Some(MachineBlock { name, used_bytes: number(unit + 2)?, most_bytes: number(unit + 3)? })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_qemus_table_are_read() {
        let table = "              Block Name    PSize              Offset               Used              Total                HVA  RO\r\n\
            \x20                 pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007fcf23e00000  rw\r\n\
            \x20   /rom@etc/acpi/tables    2 MiB  0x0000000011100000 0x0000000000020000 0x0000000000200000 0x00007fcf22800000  ro\r\n";

        let blocks = parse_blocks(table).unwrap();

        let block =
            |name: &str, used_bytes, most_bytes| MachineBlock { name: name.into(), used_bytes, most_bytes };
        assert_eq!(
            blocks,
            [block("pc.ram", 0x1000_0000, 0x1000_0000), block("/rom@etc/acpi/tables", 0x20000, 0x20_0000)]
        );
    }

    #[test]
    fn blocks_of_something_else_are_not_guessed() {
        assert_eq!(parse_blocks("unknown command: 'info ramblock'\r\n"), None);
        assert_eq!(parse_blocks("Block Name PSize Offset Used Total\r\nx y z\r\n"), None);
    }
}
