//! Migrations between two VMs. The first VM controls the test; the second performs orders that it receives
//! over TCP.

use std::io::BufReader;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::bench::Machine;
use super::blocks::table_of;
use super::capture::{Capture, Conversation};
use super::reliability::Place;
use super::way::{Source, Way, digest, ram, same, still};
use super::{Scenario, child, golden};
use crate::Builder;
use crate::kernel::output;
use crate::qemu::{PATIENCE, Qemu};
use crate::scenarios::Failure;

/// Variable of init's environment with the number of this VM: 0 or 1.
pub(in crate::lab) const SIDE: &str = "LAB_SIDE";
/// Addresses of the two VMs.
const ADDRESSES: [&str; 2] = ["10.10.0.1", "10.10.0.2"];
/// Port on which the second VM receives orders.
const PORT: u16 = 4000;

/// Number of this VM.
pub(in crate::lab) fn side() -> usize {
    usize::from(std::env::var(SIDE).is_ok_and(|side| side == "1"))
}

/// Makes a soft-RoCE device over the interface to the other VM.
pub(in crate::lab) fn prepare() -> Result<(), Failure> {
    let entries = std::fs::read_dir("/sys/class/net").map_err(|error| error.to_string())?;
    // Only the interface of a network card has a device.
    let device = entries.flatten().find(|entry| entry.path().join("device").exists());
    let name = device.ok_or("there is no network card")?.file_name().to_string_lossy().into_owned();
    for line in [
        "ip link set lo up",
        &format!("ip link set {name} mtu 9000 up"),
        &format!("ip addr add {}/24 dev {name}", ADDRESSES[side()]),
        &format!("rdma link add rxe0 type rxe netdev {name}"),
    ] {
        let mut words = line.split(' ');
        output(Command::new(words.next().unwrap_or_default()).args(words))?;
    }
    Ok(())
}

/// Runs the second VM: performs the first one's orders until there are no more.
pub(in crate::lab) fn serve() -> Result<(), Failure> {
    let listener = TcpListener::bind((ADDRESSES[1], PORT)).map_err(|error| error.to_string())?;
    let (mut answers, _) = listener.accept().map_err(|error| error.to_string())?;
    let orders = answers.try_clone().map_err(|error| error.to_string())?;
    let (mut place, mut machine) = (Place::default(), Machine::default());
    child::serve_over(BufReader::new(orders), &mut answers, |order| match order["who"].as_str() {
        Some("place") => place.perform(order),
        Some("machine") => machine.perform(order),
        other => Err(format!("{other:?} is nobody")),
    });
    Ok(())
}

/// The scenarios that the first VM runs.
pub(in crate::lab) fn scenarios() -> Vec<Scenario> {
    let plain = Way::PLAIN;
    let moves = |way: Way, lanes: u8| {
        let name = format!("two VMs: Sterna to Sterna, {}, {lanes} lanes", way.name());
        Scenario::short(name, move || between_sternas(way, lanes))
    };
    let same_words = |way: Way| {
        let name = format!("two VMs: a Sterna sends to a QEMU what a QEMU sends, {}", way.name());
        Scenario::short(name, move || alike(way))
    };
    vec![
        moves(plain, 0),
        moves(Way { chunks_mib: [64, 1], ..plain }, 2),
        Scenario::short("two VMs: QEMU to Sterna to QEMU", move || with_qemu(plain)),
        Scenario::short("two VMs: QEMU to Sterna to QEMU, all pinned", move || {
            with_qemu(Way { pin_all: true, ..plain })
        }),
        same_words(plain),
        same_words(Way { return_path: false, chunks_mib: [8, 8], ..plain }),
        same_words(Way { pin_all: true, ..plain }),
    ]
}

/// Connection to the other VM.
struct Other {
    orders: TcpStream,
    answers: BufReader<TcpStream>,
}

impl Other {
    fn reached() -> Result<Self, Failure> {
        let begin = Instant::now();
        loop {
            match TcpStream::connect((ADDRESSES[1], PORT)) {
                Ok(orders) => {
                    let answers = orders.try_clone().map_err(|error| error.to_string())?;
                    return Ok(Self { orders, answers: BufReader::new(answers) });
                }
                // The other VM may still be booting.
                Err(_) if begin.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(200)),
                Err(error) => return Err(format!("the other VM: {error}")),
            }
        }
    }

    fn ask(&mut self, who: &str, what: &str, order: &Value) -> Result<Value, Failure> {
        let mut order = order.clone();
        (order["who"], order["do"]) = (who.into(), what.into());
        child::ask(&mut self.orders, &mut self.answers, &order).map_err(|why| format!("the other VM: {why}"))
    }
}

/// Moves a guest that writes its memory to the other VM, and checks it there.
fn between_sternas(way: Way, lanes: u8) -> Result<(), Failure> {
    with_other(|other| {
        let order = json!({
            "guest": 7, "uri": uri(1), "way": way.to_json(), "lanes": lanes, "is_disturbed": false,
        });
        let mut here = Place::default();
        let mut told = |what: &str| {
            let mut order = order.clone();
            order["do"] = what.into();
            here.perform(&order)
        };
        other.ask("place", "receive", &order)?;
        told("boot")?;
        told("send")?;
        let begin = Instant::now();
        loop {
            let [left, arrived] = [told("look")?, other.ask("place", "look", &order)?];
            if left["end"].is_string() && arrived["end"].is_string() {
                if left["end"] != "gone" || left["runs"] == true || arrived["end"] != "arrived" {
                    return Err(format!("{left}; {arrived}"));
                }
                break;
            }
            if begin.elapsed() > PATIENCE {
                return Err(format!("it does not end: {left}; {arrived}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        other.ask("place", "check", &order).map(drop)
    })
}

/// Moves a stopped QEMU's machine into memory of the other VM's Sterna. From there it moves into another QEMU
/// here.
fn with_qemu(way: Way) -> Result<(), Failure> {
    with_other(|other| {
        let mut source = Source::default();
        let (source, left) = source.get()?;
        into_other(other, source, way)?;
        if other.ask("machine", "digest", &json!({}))?["digest"] != digest(left) {
            return Err("RAM arrived changed at Sterna".into());
        }
        let destination = out_of_other(other, still()?, way)?;
        same(left, &ram(&destination)?)
    })
}

/// The same, with a comparison of the bytes that Sterna and the first QEMU sent.
fn alike(way: Way) -> Result<(), Failure> {
    with_other(|other| {
        let small = still()?.memory_mib(8);
        let mut source = small.clone().spawn()?;
        crate::fill(&source.directory().join("ram"), 1)?;
        let [of_qemu, of_sterna] = [
            captured(|| into_other(other, &mut source, way))?,
            captured(|| out_of_other(other, small, way).map(drop))?,
        ];
        golden::compare(way, &of_qemu, &of_sterna)
    })
}

fn captured(migrate: impl FnOnce() -> Result<(), Failure>) -> Result<Vec<Conversation>, Failure> {
    let capture = Capture::start()?;
    let migrated = migrate();
    let found = capture.finish();
    migrated?;
    found
}

fn into_other(other: &mut Other, source: &mut Qemu, way: Way) -> Result<(), Failure> {
    let into = uri(1);
    let blocks: Vec<_> = table_of(source)?.iter().map(|(name, length)| json!([name, length])).collect();
    other.ask("machine", "receive", &json!({ "blocks": blocks, "uri": into, "way": way.to_json() }))?;
    way.set_source(source)?;
    source.start_migration(&into)?;
    source.wait_for_migration()?;
    other.ask("machine", "await", &json!({})).map(drop)
}

fn out_of_other(other: &mut Other, to: Builder, way: Way) -> Result<Qemu, Failure> {
    let mut destination = to.incoming_defer().spawn()?;
    let out = uri(0);
    way.set_destination(&mut destination)?;
    destination.start_incoming(&out)?;
    other.ask("machine", "send", &json!({ "uri": out, "way": way.to_json() }))?;
    destination.wait_for_migration()?;
    Ok(destination)
}

/// Runs `act` with the only connection to the other VM.
fn with_other(act: impl FnOnce(&mut Other) -> Result<(), Failure>) -> Result<(), Failure> {
    static OTHER: parking_lot::Mutex<Option<Other>> = parking_lot::Mutex::new(None);
    let mut other = OTHER.lock();
    let other = match &mut *other {
        Some(other) => other,
        none => none.insert(Other::reached()?),
    };
    act(other)
}

/// An address at that VM, with a port that no other migration uses.
fn uri(side: usize) -> String {
    let port = Way::next_port();
    format!("rdma:{}:{port}", ADDRESSES[side])
}
