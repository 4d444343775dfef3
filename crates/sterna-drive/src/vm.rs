//! The monitor of one VM, with typed queries.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_libvirt::{DomainAddress, Door};
use sterna_qmp::{Client, ClientError, Endpoint, QmpEvent};
use sterna_transport::CancelFlag;

use super::error::DriveError;
use super::monitor_address::MonitorAddress;
use super::progress::Progress;
use super::schema::Schema;

/// How long an answer may take. Most commands answer immediately. Only a VM with a problem needs longer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long the answer to one of the `WORKING` commands may take.
const WORK_LIMIT: Duration = Duration::from_secs(60);
/// Commands that do their work before they answer: compute (credentials), flush or open disks, or connect.
const WORKING: [&str; 16] = [
    "object-add",
    "stop",
    "cont",
    "quit",
    "migrate",
    "migrate-incoming",
    "blockdev-add",
    "blockdev-del",
    "blockdev-mirror",
    "block-job-cancel",
    "x-blockdev-change",
    "chardev-add",
    "device_add",
    "nbd-server-start",
    "nbd-server-stop",
    "x-colo-lost-heartbeat",
];

/// How long the answer to a command may take.
fn answer_limit(command: &str) -> Duration {
    if WORKING.contains(&command) { WORK_LIMIT } else { ANSWER_LIMIT }
}

/// A negotiated connection to a VM's monitor.
pub struct Vm {
    client: Client,
    at: String,
    /// The address for reconnecting. None for a connection that was passed in.
    endpoint: Option<Endpoint>,
    wants_oob: bool,
    /// The connection was closed by [`let_go`](Vm::let_go), so that another client can use the monitor.
    is_let_go: bool,
    schema: Option<Schema>,
    /// The way through libvirt. It is dropped after the client.
    door: Option<Door>,
}

/// A RAM block of the machine, as listed by `info ramblock`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineBlock {
    /// Name of the block, as in the stream (specs/mapped-ram.md §2.2).
    pub name: String,
    /// Size in use, in bytes.
    pub used_bytes: u64,
    /// Size to which the block can grow, in bytes. Most blocks cannot grow: it equals the size in use.
    pub most_bytes: u64,
}

impl Vm {
    /// Connects to the monitor at `endpoint`.
    pub fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        Self::connect_unless(endpoint, &CancelFlag::new())
    }

    /// Does the same as [`connect`](Self::connect), until `cancel` is cancelled.
    ///
    /// # Errors
    /// [`ClientError::Cancelled`], and those of [`connect`](Self::connect).
    pub fn connect_unless(endpoint: &Endpoint, cancel: &CancelFlag) -> Result<Self, ClientError> {
        let vm = Self::new(Client::connect_unless(endpoint, ANSWER_LIMIT, cancel)?, endpoint.to_string());
        Ok(Self { endpoint: Some(endpoint.clone()), ..vm })
    }

    /// Does the same as [`connect`](Self::connect), with out-of-band execution if the monitor supports it.
    pub fn connect_oob(endpoint: &Endpoint) -> Result<Self, ClientError> {
        Self::connect_oob_within(endpoint, ANSWER_LIMIT)
    }

    /// Does the same as [`connect_oob`](Self::connect_oob), until `cancel` is cancelled.
    ///
    /// # Errors
    /// [`ClientError::Cancelled`], and those of [`connect_oob`](Self::connect_oob).
    pub fn connect_oob_unless(endpoint: &Endpoint, cancel: &CancelFlag) -> Result<Self, ClientError> {
        let client = Client::connect_oob_unless(endpoint, ANSWER_LIMIT, cancel)?;
        let vm = Self::new(client, endpoint.to_string());
        Ok(Self { endpoint: Some(endpoint.clone()), wants_oob: true, ..vm })
    }

    /// Does the same as [`connect_oob`](Self::connect_oob) if the monitor answers within `limit`. Later answers have
    /// the usual limit.
    pub fn connect_oob_within(endpoint: &Endpoint, limit: Duration) -> Result<Self, ClientError> {
        let mut client = Client::connect_oob(endpoint, limit)?;
        client.set_limit(ANSWER_LIMIT);
        let vm = Self::new(client, endpoint.to_string());
        Ok(Self { endpoint: Some(endpoint.clone()), wants_oob: true, ..vm })
    }

    /// Connects to the monitor at `address`, until `cancel` is cancelled. A domain of libvirt gets a monitor of its own if its
    /// QEMU is 11.1 or later. It is removed when the returned value is dropped.
    ///
    /// # Errors
    /// [`DriveError::Monitor`] and [`DriveError::Libvirt`].
    pub fn connect_to(address: &MonitorAddress, cancel: &CancelFlag) -> Result<Self, DriveError> {
        match address {
            MonitorAddress::Socket(endpoint) => Self::connect_unless(endpoint, cancel)
                .map_err(|error| DriveError::Monitor { at: endpoint.to_string(), error }),
            MonitorAddress::Domain(domain) => Self::connect_domain(domain, cancel),
        }
    }

    fn connect_domain(domain: &DomainAddress, cancel: &CancelFlag) -> Result<Self, DriveError> {
        let at = domain.to_string();
        let opened = Door::open(domain, cancel);
        let (door, socket) = opened.map_err(|error| DriveError::Libvirt { at: at.clone(), error })?;
        let client = Client::from_socket(socket, ANSWER_LIMIT)
            .map_err(|error| DriveError::Monitor { at: at.clone(), error })?;
        Ok(Self { door: Some(door), ..Self::new(client, at) })
    }

    /// Uses an existing connection. `at` is its name in messages.
    pub fn new(client: Client, at: impl Into<String>) -> Self {
        Self {
            client,
            at: at.into(),
            endpoint: None,
            wants_oob: false,
            is_let_go: false,
            schema: None,
            door: None,
        }
    }

    /// Closes the connection, so that another client can use the monitor: QEMU's monitor serves one client at a time.
    /// The next command connects again. No effect on a Sterna, whose monitor serves many clients, or on a connection
    /// that was passed in.
    pub fn let_go(&mut self) {
        if self.endpoint.is_some() && !self.is_sterna() {
            self.client.close();
            self.is_let_go = true;
        }
    }

    /// Connects again after [`let_go`](Self::let_go), if the monitor answers within `limit`.
    ///
    /// # Errors
    /// [`ClientError::TimedOut`]: another client uses the monitor, or the VM does not answer.
    pub fn come_back(&mut self, limit: Duration) -> Result<(), ClientError> {
        let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.is_let_go) else { return Ok(()) };
        let connect = if self.wants_oob { Client::connect_oob } else { Client::connect };
        let mut client = connect(endpoint, limit)?;
        client.set_limit(ANSWER_LIMIT);
        (self.client, self.is_let_go) = (client, false);
        Ok(())
    }

    /// Name of the VM in messages: the address of its monitor.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// The underlying QMP connection.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Whether the VM is Sterna's VMM.
    pub fn is_sterna(&self) -> bool {
        self.client.is_sterna()
    }

    /// The version of the VM, as text.
    pub fn version(&self) -> String {
        let version = self.client.version();
        let qemu = &version["qemu"];
        let number = |name: &str| qemu[name].as_u64().unwrap_or(0);
        let numbers = format!("QEMU {}.{}.{}", number("major"), number("minor"), number("micro"));
        match version["package"].as_str() {
            Some(package) if self.is_sterna() => format!("{package} (reports version {numbers})"),
            Some(package) if !package.is_empty() => format!("{numbers} ({package})"),
            _ => numbers,
        }
    }

    /// The major version of QEMU that the VM is, or whose protocol it uses.
    pub fn major_version(&self) -> u64 {
        self.client.version()["qemu"]["major"].as_u64().unwrap_or(0)
    }

    /// Executes a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, DriveError> {
        self.try_execute(command, arguments).map_err(|error| self.error(error))
    }

    /// Executes a command whose refusal the caller evaluates. The answer to a command that computes or waits for disks
    /// may take longer than [`ANSWER_LIMIT`], unless another limit was set ([`Client::set_limit`]).
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.come_back(ANSWER_LIMIT)?;
        if self.client.limit() != ANSWER_LIMIT {
            return self.client.execute(command, arguments);
        }
        self.client.set_limit(answer_limit(command));
        let answer = self.client.execute(command, arguments);
        self.client.set_limit(ANSWER_LIMIT);
        answer
    }

    /// The commands that this monitor knows. Queried once.
    ///
    /// # Errors
    /// The connection to the monitor broke.
    pub fn schema(&mut self) -> Result<&Schema, DriveError> {
        if self.schema.is_none() {
            let schema = match self.try_execute("query-qmp-schema", Value::Null) {
                Ok(answer) => Schema::parse(&answer),
                Err(ClientError::Refused { .. }) => Schema::default(),
                Err(error) => return Err(self.error(error)),
            };
            self.schema = Some(schema);
        }
        Ok(self.schema.get_or_insert_default())
    }

    /// Refuses a monitor that lacks `command`. `what` is the purpose of the command.
    ///
    /// # Errors
    /// [`DriveError::Unfit`] with the command and the VM's version.
    pub fn must_have(&mut self, command: &str, what: &str) -> Result<(), DriveError> {
        if self.schema()?.has(command) {
            return Ok(());
        }
        Err(DriveError::Unfit(format!(
            "{} ({}) does not know `{command}`: {what}",
            self.at(),
            self.version()
        )))
    }

    /// Whether commands can be executed out of band, while the VM answers no other command.
    pub fn has_oob(&self) -> bool {
        self.client.has_oob()
    }

    /// Executes `migrate-pause`: breaks a postcopy whose dead connection was not noticed. Works even if the VM's main
    /// loop is blocked.
    pub fn migrate_pause(&mut self) -> Result<(), ClientError> {
        self.come_back(ANSWER_LIMIT)?;
        self.client.execute_oob("migrate-pause", Value::Null).map(drop)
    }

    /// Executes `migrate-recover`: a VM with a paused postcopy listens again. Works even if the VM's main loop is
    /// blocked.
    pub fn migrate_recover(&mut self, uri: &str) -> Result<(), ClientError> {
        self.come_back(ANSWER_LIMIT)?;
        self.client.execute_oob("migrate-recover", json!({ "uri": uri })).map(drop)
    }

    /// Executes `migrate-incoming`. If the VM supports it, it does not exit after a failure, so that it can report it.
    pub fn migrate_incoming(&mut self, uri: &str) -> Result<(), DriveError> {
        let mut arguments = json!({ "uri": uri });
        // QEMU before 9.1 does not know the argument. It exits, and prints the reason to its standard error.
        if self.schema()?.takes("migrate-incoming", "exit-on-error") {
            arguments["exit-on-error"] = false.into();
        }
        self.execute("migrate-incoming", arguments).map(drop)
    }

    /// Waits up to `limit` for the next event.
    pub fn next_event(&mut self, limit: Duration) -> Result<Option<QmpEvent>, DriveError> {
        self.client.next_event(limit).map_err(|error| self.error(error))
    }

    /// The `status` of `query-status`.
    pub fn run_state(&mut self) -> Result<String, DriveError> {
        Ok(text(&self.execute("query-status", Value::Null)?["status"]))
    }

    /// Executes `query-migrate`.
    pub fn progress(&mut self) -> Result<Progress, DriveError> {
        Ok(Progress::from_query(&self.execute("query-migrate", Value::Null)?))
    }

    /// The machine type with its version, as in the stream (specs/stream.md §1.2).
    pub fn machine_type(&mut self) -> Result<String, DriveError> {
        if self.is_sterna() {
            return Ok(text(&self.execute("query-machines", Value::Null)?[0]["name"]));
        }
        let class = self.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
        let class = text(&class);
        Ok(class.strip_suffix("-machine").unwrap_or(&class).to_owned())
    }

    /// The machine's UUID. None if it has none, or if the monitor does not know the query.
    pub fn uuid(&mut self) -> Result<Option<[u8; 16]>, DriveError> {
        let answer = match self.try_execute("query-uuid", Value::Null) {
            Ok(answer) => text(&answer["UUID"]),
            Err(ClientError::Refused { .. }) => return Ok(None),
            Err(error) => return Err(self.error(error)),
        };
        let digits: String = answer.chars().filter(|digit| *digit != '-').collect();
        let number =
            u128::from_str_radix(&digits, 16).ok().filter(|number| digits.len() == 32 && *number != 0);
        Ok(number.map(u128::to_be_bytes))
    }

    /// The machine's RAM blocks. None if the monitor does not know the query.
    pub fn blocks(&mut self) -> Result<Option<Vec<MachineBlock>>, DriveError> {
        match self.client.human("info ramblock") {
            Ok(table) => Ok(parse_blocks(&table)),
            Err(ClientError::Refused { .. }) => Ok(None),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Adds `fd` to the descriptor set `set`, or to a new one. Returns the number of the set (`/dev/fdset/N`).
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

    /// Passes `fd` to the VM under `name` (`fd:NAME`).
    pub fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), DriveError> {
        self.check_takes_descriptors()?;
        self.client.send_fd(name, fd).map_err(|error| self.error(error))
    }

    fn check_takes_descriptors(&self) -> Result<(), DriveError> {
        let is_elsewhere = self.door.as_ref().is_some_and(|door| !door.passes_files());
        if is_elsewhere || self.at.starts_with("tcp:") {
            return Err(DriveError::Unfit(format!(
                "files are passed to the VM as descriptors, which {} cannot transfer: run this command on the VM's host, \
                 with a unix socket of its monitor or the domain's name",
                self.at
            )));
        }
        Ok(())
    }

    pub(super) fn error(&self, error: ClientError) -> DriveError {
        DriveError::Monitor { at: self.at.clone(), error }
    }
}

/// Parses the table of `info ramblock`. Its columns are name, page size with its unit, offset, used, total, and
/// further ones in newer versions. None for any other text.
fn parse_blocks(table: &str) -> Option<Vec<MachineBlock>> {
    let mut lines = table.lines();
    lines.next().filter(|head| head.contains("Block Name") && head.contains("Total"))?;
    lines.filter(|line| !line.trim().is_empty()).map(parse_block).collect()
}

fn parse_block(line: &str) -> Option<MachineBlock> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // Names may contain spaces, so the columns are counted from the unit.
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
