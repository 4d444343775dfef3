//! Calls the method of [`MigrationControl`] for each command of [`COMMANDS`].

use serde_json::{Map, Value, json};
use sterna::{Address, HandedFd, Status};
use uuid::Uuid;

use super::engine::GuestAt;
use super::events::EVENTS;
use super::{COMMANDS, MigrationControl, address, capabilities, dirty_rate, hmp};
use crate::error::QmpError;
use crate::server::{Arguments, CommandSpec, Context, EventSpec, Handler};

impl Handler for MigrationControl {
    fn commands(&self) -> Vec<CommandSpec> {
        COMMANDS.to_vec()
    }

    fn events(&self) -> Vec<EventSpec> {
        EVENTS.to_vec()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        let done = |()| json!({});
        let text = |name| Arguments(arguments).required_string(name);
        match command {
            "query-status" => {
                let status = self.run_state();
                Ok(json!({"status": status, "running": status == "running"}))
            }
            "query-migrate" => Ok(self.query()),
            "query-migrate-capabilities" => Ok(self.capabilities().to_json()),
            "query-migrate-parameters" => Ok(self.parameters().to_json()),
            "x-sterna-migration-statistics" => Ok(self.statistics()),
            "x-sterna-migration-recording" => Ok(self.recording()),
            "stop" => self.stop().map(done),
            "cont" => self.cont().map(done),
            "quit" => {
                self.quit_after_reply(context);
                Ok(json!({}))
            }
            "migrate" => {
                let to = address::from_arguments(command, arguments)?;
                match Arguments(arguments).flag("resume")? {
                    true => self.resume_from(to, context).map(done),
                    false => self.migrate_from(to, context).map(done),
                }
            }
            "x-sterna-live-save" => {
                let to = with_descriptor(address::from_uri(text("uri")?)?, context, false)?;
                self.live_save(&to, arguments).map(done)
            }
            "x-sterna-complete-memory" => self.complete_memory(arguments, context),
            "x-sterna-query-live-save" => Ok(self.query_live_save()),
            "migrate-incoming" => {
                if Arguments(arguments).flag("exit-on-error")? {
                    return Err(QmpError::generic(
                        "'exit-on-error' is not supported: after a failure Sterna waits for another \
                         'migrate-incoming'; leave it out and 'quit' the VM yourself",
                    ));
                }
                let at = address::from_arguments(command, arguments)?;
                self.listen_from(at, context).map(done)
            }
            "migrate-recover" => {
                let at = address::from_uri(text("uri")?)?;
                self.recover_from(at, context).map(done)
            }
            "migrate_cancel" => {
                let force = Arguments(arguments).flag("x-sterna-force")?;
                self.cancel(force).map(done)
            }
            "migrate-continue" => self.continue_switchover(text("state")?).map(done),
            "migrate-start-postcopy" => self.start_postcopy().map(done),
            "migrate-pause" => self.pause_postcopy().map(done),
            "migrate-set-capabilities" => {
                let changes = capabilities::parse_changes(&arguments["capabilities"])?;
                self.set_capabilities(&changes).map(done)
            }
            "migrate-set-parameters" => self.set_parameters(arguments).map(done),
            "calc-dirty-rate" => self.calc_dirty_rate(dirty_rate::Order::parse(arguments)?).map(done),
            "query-dirty-rate" => self.query_dirty_rate(arguments),
            "set-vcpu-dirty-limit" | "cancel-vcpu-dirty-limit" => self.limit_dirty_rate(arguments).map(done),
            "query-vcpu-dirty-limit" => Ok(self.query_dirty_limits()),
            "query-block" => Ok(self.query_block()),
            "block_resize" => self.block_resize(arguments).map(done),
            "announce-self" => self.announce_self(arguments).map(done),
            "object-add" => self.add_object(arguments).map(done),
            "object-del" => self.delete_object(text("id")?).map(done),
            "qom-list" => self.list_properties(text("path")?),
            "qom-get" => self.property(text("path")?, text("property")?),
            "human-monitor-command" => Ok(hmp::run(self, text("command-line")?, context).into()),
            "x-sterna-decide" => {
                let seen = Arguments(arguments).string("expect")?.map(expected).transpose()?;
                self.decide(guest_at(text("guest")?)?, seen).map(done)
            }
            _ => self.execute_protection(command, arguments).unwrap_or_else(|| self.describe(command)),
        }
    }
}

impl MigrationControl {
    pub(super) fn quit_after_reply(&self, context: &mut Context) {
        self.announce_shutdown();
        let vm = self.vm.shared();
        context.after_reply(move || vm.quit());
    }

    pub(super) fn migrate_from(&self, to: Address, context: &mut Context) -> Result<(), QmpError> {
        self.migrate(&with_descriptor(to, context, true)?)
    }

    pub(super) fn listen_from(&self, at: Address, context: &mut Context) -> Result<(), QmpError> {
        self.listen(&with_descriptor(at, context, false)?)
    }

    pub(super) fn resume_from(&self, to: Address, context: &mut Context) -> Result<(), QmpError> {
        self.resume(&with_descriptor(to, context, false)?)
    }

    pub(super) fn recover_from(&self, at: Address, context: &mut Context) -> Result<(), QmpError> {
        self.recover(&with_descriptor(at, context, false)?)
    }

    fn describe(&self, command: &str) -> Result<Value, QmpError> {
        let machine = self.vm.machine_type();
        let threads = self.vm.vcpu_threads();
        match command {
            "query-name" if self.vm.name().is_empty() => Ok(json!({})),
            "query-name" => Ok(json!({"name": self.vm.name()})),
            "query-uuid" => {
                let uuid = Uuid::from_bytes(self.vm.uuid().unwrap_or_default());
                Ok(json!({"UUID": uuid.to_string()}))
            }
            "query-kvm" => Ok(json!({
                "enabled": self.vm.uses_kvm(),
                "present": self.vm.uses_kvm() || std::path::Path::new("/dev/kvm").exists(),
            })),
            "query-target" => Ok(json!({"arch": std::env::consts::ARCH})),
            "query-machines" => Ok(json!([{
                "name": machine,
                "is-default": true,
                "cpu-max": threads.len().max(1),
                "hotpluggable-cpus": false,
                "numa-mem-supported": false,
                "deprecated": false,
                "acpi": false,
            }])),
            "query-cpus-fast" => {
                let cpu = |(index, thread): (usize, &i32)| {
                    json!({
                        "cpu-index": index,
                        "thread-id": thread,
                        "qom-path": format!("/machine/cpu[{index}]"),
                        "target": std::env::consts::ARCH,
                    })
                };
                Ok(threads.iter().enumerate().map(cpu).collect())
            }
            "query-memory-size-summary" => Ok(json!({"base-memory": self.vm.ram().total_bytes()})),
            _ => Err(QmpError::command_not_found(format!("The command {command} has not been found"))),
        }
    }
}

/// Replaces the descriptor's name in the address by the descriptor that `getfd` passed. This uses the descriptor up,
/// and it is closed with the migration. A number names a descriptor that belongs to another part of this process. It
/// is only duplicated. `may_be_pipe`: a guest is saved there.
fn with_descriptor(address: Address, context: &mut Context, may_be_pipe: bool) -> Result<Address, QmpError> {
    let Address::Fd(name) = &address else { return Ok(address) };
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(address);
    }
    let fd = context.take_fd(name).ok_or_else(|| {
        QmpError::generic(format!("File descriptor named '{name}' has not been found; pass it with 'getfd'"))
    })?;
    let is_socket = rustix::net::sockopt::socket_type(&fd).is_ok();
    let handed = Address::Handed(HandedFd::new(fd, name));
    if is_socket || may_be_pipe && handed.is_pipe() {
        return Ok(handed);
    }
    let or_pipe = if may_be_pipe { ", or a pipe to save the guest" } else { "" };
    Err(QmpError::generic(format!(
        "The descriptor '{name}' is not a socket; pass a connected socket{or_pipe}"
    )))
}

/// A status in which a decision is possible.
fn expected(word: &str) -> Result<Status, QmpError> {
    match word {
        "undecided" => Ok(Status::Undecided),
        "postcopy-paused" => Ok(Status::PostcopyPaused),
        "postcopy-recover" => Ok(Status::PostcopyRecover),
        _ => Err(QmpError::expects("expect", "'undecided', 'postcopy-paused' or 'postcopy-recover'")),
    }
}

fn guest_at(word: &str) -> Result<GuestAt, QmpError> {
    match word {
        "source" => Ok(GuestAt::Source),
        "destination" => Ok(GuestAt::Destination),
        _ => Err(QmpError::expects(
            "guest",
            "'source' (it resumes) or 'destination' (it stays stopped permanently)",
        )),
    }
}
