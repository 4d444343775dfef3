//! `sterna info`: shows the state of a VM, of its migration, of its protection, or of a relay.

mod relay;

use serde_json::{Value, json};
use sterna_drive::MonitorAddress;
use sterna_drive::protect::LeftProtection;

use super::unprotect::described;
use crate::exit::{Done, Status, Stop};
use crate::monitor::{Monitor, Progress, SECOND_MONITOR};
use crate::record::Record;
use crate::{libvirt, summary, terminal, units};

/// Which VM.
#[derive(Debug, clap::Args)]
#[command(after_help = SECOND_MONITOR, after_long_help = format!("{SECOND_MONITOR}\n\n{}", libvirt::HELP))]
pub struct Arguments {
    /// QMP socket of the VM, of `sterna protect`, of `sterna standby` or of `sterna relay`: unix:PATH, a path, or
    /// tcp:HOST:PORT. Or a domain of libvirt: libvirt:NAME
    pub socket: MonitorAddress,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Queries the VM and prints its state.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    if monitor.is_sterna()
        && let Ok(protection) = monitor.try_execute("x-sterna-query-protection", Value::Null)
        // A VM that is a side of a protection reports the protection instead.
        && protection["schema"].is_string()
    {
        terminal::print(&protection_of(&protection, arguments.json));
        return Ok(Status::Done);
    }
    if monitor.is_sterna()
        && let Ok(relay) = monitor.try_execute("query-relay", Value::Null)
    {
        terminal::print(&relay::text(&relay, arguments.json));
        return Ok(Status::Done);
    }
    let info = Info::ask(&mut monitor)?;
    terminal::print(&if arguments.json { info.json(&monitor)? } else { info.table(&monitor) });
    Ok(Status::Done)
}

/// The text for the state that the monitor of `sterna protect --qmp` reports.
fn protection_of(protection: &Value, is_json: bool) -> String {
    if is_json {
        return format!("{protection:#}\n");
    }
    let number = |name: &str| protection[name].as_u64().unwrap_or(0);
    let time = |name: &str| protection[name].as_f64().map_or_else(|| "none".to_owned(), units::seconds);
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    let stands = if protection["guest_stopped"] == true { ", the guest is stopped" } else { "" };
    row("protection", format!("{}{stands}", protection["state"].as_str().unwrap_or_default()));
    row(
        "checkpoints",
        format!("{}; pause {}, 99 % below {}", number("checkpoint"), time("pause_p50"), time("pause_p99")),
    );
    row(
        "output",
        format!(
            "waits {}, 99 % below {}; {} packets released, {} wait ({})",
            time("output_delay_p50"),
            time("output_delay_p99"),
            units::count(number("output_released_packets")),
            units::count(number("output_waiting_packets")),
            units::bytes(number("output_waiting_bytes"))
        ),
    );
    row("sent", format!("{} in {}", units::bytes(number("stream_bytes")), time("age")));
    for (name, key) in [("lost", "lost_because"), ("trouble", "trouble")] {
        if let Some(why) = protection[key].as_str() {
            row(name, why.to_owned());
        }
    }
    text
}

/// How far the memory was loaded from an image. Empty if the guest comes from elsewhere.
fn restored(restore: &Value) -> String {
    let Some(image) = restore["image"].as_str() else { return String::new() };
    if let Some(error) = restore["error"].as_str() {
        return format!("from {image}: {error}");
    }
    let bytes = |name: &str| {
        let pages = restore[name].as_u64().unwrap_or(0);
        units::bytes(pages * restore["page-bytes"].as_u64().unwrap_or(0))
    };
    match restore["status"].as_str() {
        Some("active") => {
            format!("from {image}: {} of {} are missing", bytes("missing-pages"), bytes("total-pages"))
        }
        _ => format!("from {image}"),
    }
}

struct Info {
    status: String,
    name: String,
    uuid: String,
    machine: String,
    ram_bytes: Option<u64>,
    pages_per_second: Option<f64>,
    migration: Value,
    /// How far the memory is, if the guest was restored from an image.
    restore: Value,
    /// The protection, if this VM is a standby.
    protection: Value,
    record: Option<Record>,
    /// Objects that an interrupted protection has left in a QEMU.
    left: Option<LeftProtection>,
}

impl Info {
    fn ask(monitor: &mut Monitor) -> Result<Self, Stop> {
        // A monitor may lack one of these commands. Then only its row is missing.
        let mut maybe = |command: &str| monitor.try_execute(command, Value::Null).unwrap_or(Value::Null);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let name = text(&maybe("query-name")["name"]);
        let uuid = text(&maybe("query-uuid")["UUID"]);
        let ram_bytes = maybe("query-memory-size-summary")["base-memory"].as_u64();
        let pages_per_second = maybe("x-sterna-query-guest")["pages_per_second"].as_f64();
        let protection = maybe("x-sterna-query-protection");
        let restore = maybe("x-sterna-query-restore");
        let left = if monitor.is_sterna() { None } else { LeftProtection::look(monitor.vm()).ok() };
        let record =
            monitor.statistics()?.map(|figures| Record::new(&monitor.endpoint().to_string(), "", figures));
        Ok(Self {
            status: monitor.run_state()?,
            name,
            uuid,
            machine: monitor.vm().machine_type().unwrap_or_default(),
            ram_bytes,
            pages_per_second,
            migration: monitor.execute("query-migrate", Value::Null)?,
            restore,
            protection,
            record,
            left: left.filter(|left| !left.is_empty()),
        })
    }

    fn json(&self, monitor: &Monitor) -> Result<String, Stop> {
        let value = json!({
            "schema": "sterna-info",
            "version": 1,
            "monitor": monitor.version(),
            "status": self.status,
            "name": self.name,
            "uuid": self.uuid,
            "machine": self.machine,
            "ram_bytes": self.ram_bytes,
            "guest_pages_per_second": self.pages_per_second,
            "query_migrate": self.migration,
            "restore": self.restore,
            "protection": self.protection,
            "record": self.record,
            "left_by_protection": self.left.as_ref().map(|left| json!({
                "filters": left.filters,
                "chardevs": left.chardevs,
                "nodes": left.nodes,
                "x-colo": left.has_colo,
                "in_use": left.is_in_use,
            })),
        });
        serde_json::to_string_pretty(&value).map_err(|error| Stop::failed(error.to_string()))
    }

    fn table(&self, monitor: &Monitor) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: &str| {
            if !value.is_empty() {
                text += &format!("{name:<12} {value}\n");
            }
        };
        row("monitor", &monitor.version());
        let is_primary = self.protection["side"] == "primary";
        // These rows are for a standby, or a VM that acts as one. A guest that was taken over is shown as an
        // ordinary guest.
        if self.protection["state"].is_string() && !is_primary && self.protection["state"] != "taken over" {
            text += &standby(&self.protection);
            return text;
        }
        row("guest", &self.status);
        row("name", &self.name);
        row("uuid", &self.uuid);
        row("machine", &self.machine);
        row("RAM", &self.ram_bytes.map_or(String::new(), units::bytes));
        let writes = |pages: f64| {
            let bytes = units::rate(pages * units::PAGE_BYTES as f64);
            format!("{} pages/s ({bytes}) on each vCPU", units::count(pages.round() as u64))
        };
        row("restored", &restored(&self.restore));
        row("writes", &self.pages_per_second.map_or(String::new(), writes));
        let progress = Progress::from_query(&self.migration);
        row("migration", &progress.status);
        if is_primary {
            row("protection", &primary(&self.protection));
            row("trouble", self.protection["trouble"].as_str().unwrap_or_default());
        }
        match &self.left {
            Some(left) if left.is_in_use => row(
                "protection",
                "a `sterna protect` protects this guest: run `sterna info` at the socket of its \
                                   --qmp",
            ),
            Some(left) => {
                row("protection", &format!("left by a killed `sterna protect`: {}", described(left)));
                let how = "`sterna unprotect` at this socket removes it; add --vouch when the standby does not run \
                           the guest";
                row("unprotect", how);
            }
            None => {}
        }
        let port = |address: &Value| address["port"].as_str().map(str::to_owned);
        if let Some(port) = port(&self.migration["socket-address"][0]) {
            row("listens at", &format!("port {port}"));
        }
        if let Some(port) = port(&self.migration["x-sterna-address"]) {
            row("listens at", &format!("port {port} of RDMA"));
        }
        if self.record.is_none() {
            row("RDMA", &rdma_here(&self.migration["x-sterna-rdma"]));
        }
        match &self.record {
            Some(record) => {
                text += "\n";
                text += &summary::table(record);
            }
            None if progress.total_bytes > 0 => {
                row("remaining", &units::bytes(progress.remaining_bytes));
                row("rate", &units::rate(progress.bandwidth_bytes));
                row("dirty rate", &units::rate(progress.dirty_bytes_per_second));
            }
            None => {}
        }
        if let Some(error) = progress.error {
            text += &format!("\n{}\n", terminal::in_plain_words(&error));
        }
        text += &how_to_go_on(&self.status, &progress.status);
        // Only a source counts pages.
        let is_source = self.migration["ram"].is_object();
        text += &how_to_recover(monitor.endpoint(), is_source, monitor.is_sterna(), &progress.status);
        text
    }
}

/// The row about the protection of a VM's guest.
fn primary(now: &Value) -> String {
    let time =
        |name: &str| units::time(std::time::Duration::from_secs_f64(now[name].as_f64().unwrap_or(0.0)));
    format!(
        "{}; the standby holds checkpoint {}; pause {}, 99 % below {}; output waits {}",
        now["state"].as_str().unwrap_or_default(),
        units::count(now["held"].as_u64().unwrap_or(0)),
        time("pause-p50"),
        time("pause-p99"),
        time("output-delay")
    )
}

/// The rows of a standby.
fn standby(now: &Value) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    let word = |value: &Value| value.as_str().map(str::to_owned);
    let seconds = |value: &Value| value.as_f64().map_or_else(|| "none".to_owned(), units::seconds);
    row("standby", word(&now["state"]).unwrap_or_default());
    row("guest RAM", units::bytes(now["ram-bytes"].as_u64().unwrap_or(0)));
    let checkpoints = units::count(now["checkpoints"].as_u64().unwrap_or(0));
    row("checkpoints", format!("{checkpoints}, the last is {} old", seconds(&now["age"])));
    let contact = &now["contact"];
    if contact.is_object() {
        let is_there = if contact["connected"] == true { "in contact" } else { "lost" };
        row("contact", format!("{is_there}, lease {}", seconds(&contact["lease"])));
        let id = word(&contact["protection"]).unwrap_or_default();
        row("protection", format!("{id}, generation {}", contact["generation"]));
    }
    if let Some(spec) = word(&now["arbiter"]["spec"]) {
        let identity = word(&now["arbiter"]["identity"]);
        row("arbiter", identity.map_or(spec.clone(), |identity| format!("{spec} ({identity})")));
    }
    if let Some(vm) = word(&now["waiting-vm"]) {
        row("waiting VM", vm);
    }
    if let Some(trouble) = word(&now["trouble"]) {
        row("trouble", trouble);
    }
    text
}

/// The row about RDMA at a destination; empty if no RDMA is used.
fn rdma_here(rdma: &Value) -> String {
    let count = |name: &str| rdma[name].as_u64().unwrap_or(0);
    if !rdma.is_object() {
        return String::new();
    }
    format!(
        "{} registered in {} calls; {} commands, {} zero ranges among them",
        units::bytes(count("pinned-bytes")),
        units::count(count("registrations")),
        units::count(count("commands")),
        units::count(count("zero-ranges"))
    )
}

/// Advice for a stopped guest. After a killed save, for example, the guest stays stopped until an operator
/// resumes it.
fn how_to_go_on(guest: &str, migration: &str) -> String {
    let what = match (guest, migration) {
        ("paused", "failed" | "cancelled") => format!(
            "The guest is paused, and its last migration or save ended as `{migration}`: unless an operator paused it \
             intentionally, `cont` resumes it."
        ),
        // QEMU reports `completed` while Sterna still compresses the image or flushes it to disk.
        ("postmigrate", "completed") => "The guest was migrated or saved. Only if a save was killed before its image \
                                         was complete, `cont` resumes the guest here. In all other cases it must not \
                                         run here."
            .to_owned(),
        _ => return String::new(),
    };
    format!(
        "\n{what} A killed save leaves a file `.….partial` in the image's directory, which contains the guest's \
         memory: remove it if `sterna verify` does not call it sound, or if it is not needed.\n"
    )
}

/// The commands that an operator can use on an interrupted migration, at the VM `at`.
fn how_to_recover(at: &MonitorAddress, is_source: bool, is_sterna: bool, migration: &str) -> String {
    let what = match (migration, is_source) {
        ("postcopy-paused", true) => format!(
            "The guest is at the destination, and waits when it needs a page that only this VM has: keep this VM. \
             `sterna recover {at} ADDRESS` continues the migration, where ADDRESS is the destination's."
        ),
        ("postcopy-paused", false) => format!(
            "The guest waits when it needs a page that only its source has: keep both VMs. `sterna recover SOURCE \
             ADDRESS --dest-qmp {at}` continues the migration, where SOURCE is the source's QMP socket and ADDRESS is \
             the address at which this VM listens. If `sterna serve` was the source, use `sterna serve IMAGE ADDRESS \
             --recover`."
        ),
        ("postcopy-active", true) => format!(
            "If the source sends nothing any more, its connection is dead: `sterna recover {at} ADDRESS --pause` \
             closes it and connects again, where ADDRESS is the destination's."
        ),
        ("undecided", _) if is_sterna => format!(
            "Find out whether the guest runs at the destination, then `sterna decide {at} destination` (or `source`)."
        ),
        _ => return String::new(),
    };
    format!("\n{what}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_to_recover_names_the_command_for_the_side_that_was_asked() {
        let at: MonitorAddress = "unix:/run/a".parse().unwrap();
        let how = |is_source, status| how_to_recover(&at, is_source, true, status);

        assert!(how(true, "postcopy-paused").contains("`sterna recover unix:/run/a ADDRESS`"));
        assert!(how(false, "postcopy-paused").contains("ADDRESS --dest-qmp unix:/run/a`"));
        assert!(how(true, "postcopy-active").contains("`sterna recover unix:/run/a ADDRESS --pause`"));
        assert!(how(true, "undecided").contains("`sterna decide unix:/run/a destination`"));
        for (is_source, status) in [(false, "postcopy-active"), (true, "active"), (true, "completed")] {
            assert_eq!(how(is_source, status), "", "{status}");
        }
    }

    #[test]
    fn rdma_of_a_destination_is_one_line_or_none() {
        let rdma =
            json!({"registrations": 12, "pinned-bytes": 3 << 20, "commands": 1200, "zero-ranges": 1100});

        assert_eq!(
            rdma_here(&rdma),
            "3.00 MiB registered in 12 calls; 1\u{202f}200 commands, 1\u{202f}100 zero ranges among them"
        );
        assert_eq!(rdma_here(&Value::Null), "");
    }

    #[test]
    fn how_to_go_on_is_said_of_a_guest_that_a_broken_save_left_paused() {
        assert!(how_to_go_on("paused", "failed").contains("`cont`"));
        assert!(how_to_go_on("paused", "cancelled").contains("`cont`"));
        assert!(how_to_go_on("postmigrate", "completed").contains("must not run here"));
        for (guest, migration) in
            [("running", "failed"), ("paused", "completed"), ("paused", "none"), ("postmigrate", "none")]
        {
            assert_eq!(how_to_go_on(guest, migration), "", "{guest}, {migration}");
        }
    }
}
