//! `sterna migrate --reconnect-window`: a broken connection is replaced, and the command reports it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};

const WINDOW_SECONDS: u64 = 60;

/// A relay that can cut all of its connections at the same time.
#[derive(Clone, Default)]
struct Proxy(Arc<Mutex<Vec<TcpStream>>>, Arc<AtomicBool>);

impl Proxy {
    /// Starts a relay to port `to`. Returns its own port.
    fn begin(&self, to: u16) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = self.clone();
        std::thread::spawn(move || {
            for from in listener.incoming() {
                if proxy.1.load(Ordering::Relaxed) {
                    continue;
                }
                let (from, to) = (from.unwrap(), TcpStream::connect(("127.0.0.1", to)).unwrap());
                for (from, to) in [(&from, &to), (&to, &from)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || pump(from, to));
                }
                proxy.0.lock().unwrap().extend([from, to]);
            }
        });
        port
    }

    /// Cuts all connections and refuses new ones.
    fn end(&self) {
        self.1.store(true, Ordering::Relaxed);
        self.cut();
    }

    fn cut(&self) {
        for socket in self.0.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

struct Vms {
    directory: tempfile::TempDir,
    children: Vec<Child>,
}

impl Drop for Vms {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Vms {
    fn begin() -> Self {
        let mut vms = Self { directory: tempfile::tempdir().unwrap(), children: Vec::new() };
        for (name, more) in [("a", None), ("b", Some("--incoming=defer"))] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
            // A rate that any host can copy. A guest at full speed may never converge.
            command.args(["run", "--ram=64M", "--fill=random", "--machine=process", "--rate=1000"]);
            command.arg(format!("--exit-with-parent={}", std::process::id())).arg("--qmp");
            command.arg(vms.socket(name)).args(more).stdout(Stdio::null()).stderr(Stdio::null());
            vms.children.push(command.spawn().unwrap());
        }
        vms
    }

    fn socket(&self, name: &str) -> String {
        format!("unix:{}", self.directory.path().join(name).display())
    }

    fn client(&self, name: &str) -> Client {
        let endpoint: Endpoint = self.socket(name).parse().unwrap();
        eventually("a monitor", || Client::connect(&endpoint, Duration::from_secs(10)).ok())
    }

    fn migrate(&self, to: &str, more: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["migrate", &self.socket("a"), to, "--reconnect-window"]);
        command.arg(WINDOW_SECONDS.to_string()).args(more);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn window(client: &mut Client) -> u64 {
    let parameters = client.execute("query-migrate-parameters", json!({})).unwrap();
    parameters["x-sterna-reconnect-window"].as_u64().unwrap()
}

fn done(child: Child) -> Output {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

#[test]
fn window_is_set_on_both_sides() {
    let vms = Vms::begin();
    let (mut here, mut there) = (vms.client("a"), vms.client("b"));
    let to_b = vms.socket("b");

    let output = done(vms.migrate("tcp:127.0.0.1:0", &["--dest-qmp", &to_b, "--keep-settings"]));

    assert_eq!([window(&mut here), window(&mut there)], [WINDOW_SECONDS * 1000; 2]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(!said.contains("reconnections"), "there was none: {said}");
}

#[test]
fn guest_arrives_over_a_network_that_breaks_and_each_loss_is_told() {
    let vms = Vms::begin();
    let (mut here, mut there) = (vms.client("a"), vms.client("b"));
    let window = json!({"x-sterna-reconnect-window": WINDOW_SECONDS * 1000});
    there.execute("migrate-set-parameters", window).unwrap();
    there.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
    let address = there.execute("query-migrate", json!({})).unwrap()["socket-address"][0].clone();
    let proxy = Proxy::default();
    let port = proxy.begin(address["port"].as_str().unwrap().parse().unwrap());
    let report = vms.directory.path().join("record.json");
    let arguments = ["--set", "max-bandwidth=10M", "--report", report.to_str().unwrap()];
    let mut query = || here.execute("query-migrate", json!({})).unwrap();

    let migrating = vms.migrate(&format!("tcp:127.0.0.1:{port}"), &arguments);
    for times in 1..=2 {
        let enough = times * (8 << 20);
        let sent = |told: &Value| told["ram"]["transferred"].as_u64().is_some_and(|sent| sent > enough);
        eventually("pages", || sent(&query()).then_some(()));
        proxy.cut();
        let again = |told: &Value| told["x-sterna-reconnect"]["reconnections"] == times;
        let told = eventually("a new connection", || Some(query()).filter(again));
        assert_eq!(told["status"], "active");
    }
    here.execute("migrate-set-parameters", json!({"max-bandwidth": 0})).unwrap();
    let output = done(migrating);

    let said = String::from_utf8(output.stderr).unwrap();
    let count = |words: &str| said.lines().filter(|line| line.contains(words)).count();
    assert_eq!(count("connected again"), 2, "{said}");
    let table = String::from_utf8(output.stdout).unwrap();
    let row = table.lines().find(|line| line.contains("reconnections")).expect("a row");
    assert!(row.contains("2; ") && row.contains("without a connection"), "{row}");
    let record: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let kept = record["statistics"]["reconnections"].as_array().map(Vec::len);
    assert_eq!(kept, Some(2), "{record}");
    let rounds = record["statistics"]["rounds"].as_array().unwrap();
    let unfinished: Vec<_> = rounds.iter().filter(|round| round["unfinished"] == true).collect();
    assert_eq!((&rounds[0]["number"], &rounds[1]["number"]), (&json!(1), &json!(2)), "{rounds:?}");
    assert!(unfinished.len() >= 2 && unfinished[0]["number"] == 1, "{rounds:?}");
    // The guest never writes more than 1000 pages per second, also not while the connection is lost.
    let samples = record["statistics"]["samples"].as_array().unwrap();
    let rates = samples.iter().filter_map(|sample| sample["dirty_pages_per_second"].as_u64());
    let most = rates.max().unwrap();
    assert!(most <= 1100, "{most} pages a second");
    for round in rounds.iter().filter(|round| round["dirtied_time"].as_f64().is_some_and(|time| time > 0.1)) {
        let (pages, time) =
            (round["dirtied_pages"].as_f64().unwrap(), round["dirtied_time"].as_f64().unwrap());
        assert!(pages / time <= 1100.0, "{round}");
    }
    let page = page_of(&report);
    assert_eq!(page.matches("<rect class=\"outage\"").count(), 2, "{page}");
    assert!(page.contains(">1 (not finished)</td>"), "{page}");
}

/// The page that `sterna report` writes for a record.
fn page_of(record: &std::path::Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna")).arg("report").arg(record).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::read_to_string(record.with_extension("html")).unwrap()
}

/// Cancels a migration whose connection is lost, with the arguments `more` for `sterna cancel`.
/// Returns its output, and whether the destination immediately accepts the next migration.
fn cancel_in_an_outage(more: impl Fn(&Vms) -> Vec<String>) -> (String, bool) {
    let vms = Vms::begin();
    let (mut here, mut there) = (vms.client("a"), vms.client("b"));
    let window = json!({"x-sterna-reconnect-window": WINDOW_SECONDS * 1000});
    there.execute("migrate-set-parameters", window).unwrap();
    there.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
    let address = there.execute("query-migrate", json!({})).unwrap()["socket-address"][0].clone();
    let proxy = Proxy::default();
    let port = proxy.begin(address["port"].as_str().unwrap().parse().unwrap());
    let migrating = vms.migrate(&format!("tcp:127.0.0.1:{port}"), &["--set", "max-bandwidth=10M"]);
    let mut query = || here.execute("query-migrate", json!({})).unwrap();
    eventually("pages", || query()["ram"]["transferred"].as_u64().filter(|sent| *sent > 8 << 20));
    proxy.end();
    eventually("the loss", || query()["x-sterna-reconnect"]["disconnected"].as_u64());

    let mut cancel = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let output = cancel.arg("cancel").arg(vms.socket("a")).args(more(&vms)).output().unwrap();

    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert_eq!(migrating.wait_with_output().unwrap().status.code(), Some(130));
    assert_eq!(here.execute("query-status", json!({})).unwrap()["status"], "running");
    let next = vms.migrate("tcp:127.0.0.1:0", &["--dest-qmp", &vms.socket("b")]).wait_with_output().unwrap();
    (said, next.status.success())
}

#[test]
fn cancel_in_an_outage_ends_the_wait_of_a_destination_whose_monitor_is_given() {
    let (said, arrives) = cancel_in_an_outage(|vms| vec!["--dest-qmp".to_owned(), vms.socket("b")]);

    assert!(said.contains("cancelled; the guest continues to run at the source"), "{said}");
    assert!(arrives);
}

#[test]
fn cancel_in_an_outage_names_the_command_for_a_destination_without_a_monitor() {
    let (said, _) = cancel_in_an_outage(|_| Vec::new());

    assert!(
        said.contains("`sterna cancel DESTINATION`") && said.contains("refuses other migrations"),
        "{said}"
    );
}
