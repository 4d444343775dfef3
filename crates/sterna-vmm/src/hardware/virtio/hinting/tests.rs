//! Tests of free page hinting with drivers that follow the protocol or break it.

use sterna_ram::PAGE_SIZE;

use super::super::testing::{BUFFERS, Driver};
use super::*;

const PAGE: u32 = PAGE_SIZE as u32;
const FREE_AT: u64 = 0x8_0000;

/// A descriptor: address, length, and whether the device writes to it.
type Part = (u64, u32, bool);
type Hints = Arc<Mutex<Vec<(usize, u64, u64)>>>;

/// A device that has asked, and the hints that it received.
fn asking() -> (Hinting, Hints) {
    let hinting = Hinting::default();
    let hints = Hints::default();
    ask(&hinting, &hints);
    (hinting, hints)
}

fn ask(hinting: &Hinting, hints: &Hints) {
    let hints = Arc::clone(hints);
    hinting.0.lock().ask(FreePages::new(move |block, first, pages| hints.lock().push((block, first, pages))));
}

/// Hands a chain to the device. The error is the reason of the refusal.
fn give(hinting: &Hinting, driver: &mut Driver, parts: &[Part]) -> Result<(), &'static str> {
    driver.add(parts);
    let ram = driver.ram.clone();
    let mut rings = driver.rings();
    let chain = rings[0].pop().unwrap().unwrap();
    let taken = hinting.take(&ram, &chain);
    rings[0].push(chain.head, 0).unwrap();
    taken
}

fn command(hinting: &Hinting, driver: &mut Driver, id: u32) {
    driver.put(BUFFERS, &id.to_le_bytes());
    give(hinting, driver, &[(BUFFERS, 4, false)]).unwrap();
}

fn free(hinting: &Hinting, driver: &mut Driver, page: u64) {
    give(hinting, driver, &[(FREE_AT + page * u64::from(PAGE), PAGE, true)]).unwrap();
}

#[test]
fn free_memory_counts_between_the_commands_id_and_stop() {
    let (mut driver, (hinting, hints)) = (Driver::new(), asking());
    let first = FREE_AT / u64::from(PAGE);

    free(&hinting, &mut driver, 0);
    command(&hinting, &mut driver, FIRST);
    free(&hinting, &mut driver, 1);
    // Two and a half pages, starting in the middle of a page.
    give(&hinting, &mut driver, &[(FREE_AT + 0x2800, 0x2800, true)]).unwrap();
    let is_complete = || hinting.0.lock().free.as_ref().unwrap().is_complete();
    assert!(!is_complete());
    command(&hinting, &mut driver, STOP);
    assert!(is_complete());
    free(&hinting, &mut driver, 6);

    assert_eq!(*hints.lock(), [(0, first + 1, 1), (0, first + 3, 2)]);
}

#[test]
fn answer_to_another_command_is_ignored() {
    let (mut driver, (hinting, hints)) = (Driver::new(), asking());
    for id in [DONE, FIRST + 1, u32::MAX] {
        command(&hinting, &mut driver, id);
        free(&hinting, &mut driver, 0);
    }
    // The driver begins its answer, and then the device asks another question.
    command(&hinting, &mut driver, FIRST);
    hinting.0.lock().leave_off(STOP);
    free(&hinting, &mut driver, 1);
    ask(&hinting, &hints);
    free(&hinting, &mut driver, 2);
    command(&hinting, &mut driver, FIRST);
    free(&hinting, &mut driver, 3);
    assert!(hints.lock().is_empty(), "{hints:?}");

    command(&hinting, &mut driver, FIRST + 1);
    free(&hinting, &mut driver, 4);
    assert_eq!(hints.lock().len(), 1);
    // A driver that begins again resets the device first.
    hinting.reset();
    free(&hinting, &mut driver, 5);
    assert_eq!(hints.lock().len(), 1);
}

#[test]
fn buffers_that_are_neither_a_command_nor_memory_are_refused() {
    let cases: [(&str, &[Part]); 5] = [
        ("4 bytes", &[(BUFFERS, 3, false)]),
        ("4 bytes", &[(BUFFERS, 8, false)]),
        ("both a command and memory", &[(BUFFERS, 4, false), (FREE_AT, PAGE, true)]),
        ("both a command and memory", &[(BUFFERS, 2, false), (FREE_AT, PAGE, true)]),
        ("empty", &[(BUFFERS, 0, true)]),
    ];
    for (says, parts) in cases {
        let (mut driver, (hinting, hints)) = (Driver::new(), asking());
        command(&hinting, &mut driver, FIRST);
        let why = give(&hinting, &mut driver, parts).unwrap_err();
        assert!(why.contains(says), "{parts:?}: {why}");
        assert!(hints.lock().is_empty());
    }
}

#[test]
fn state_tells_the_driver_that_it_may_have_its_memory_back() {
    let (asked, there) = (asking().0, Hinting::default());
    let space = ConfigurationSpace::new(vec![0; 16]);
    let shown = || {
        let mut id = [0; 4];
        space.read(ID.start as u64, &mut id);
        u32::from_le_bytes(id)
    };

    // The answer does not change if the driver is gone.
    assert!(asked.is_asking());
    asked.reset();
    asked.0.lock().leave_off(STOP);
    assert!(asked.is_asking());
    asked.0.lock().leave_off(DONE);
    assert!(!asked.is_asking());

    there.set_state(&Hinting::default().state()).unwrap();
    assert!(!there.is_asking() && !there.begin_work(&space), "nothing was asked");
    there.set_state(&asked.state()).unwrap();
    assert!(there.begin_work(&space));
    assert_eq!(shown(), DONE);
    assert!(!there.begin_work(&space), "the driver knows it");
    // An earlier id is not used again.
    ask(&there, &Hints::default());
    assert!(there.begin_work(&space));
    assert_eq!(shown(), FIRST + 1);
    assert!(there.set_state(&[]).is_err() && there.set_state(&[0; 5]).is_err());
}
