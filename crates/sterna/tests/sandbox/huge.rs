//! The system calls for guest memory on huge pages. The lab VM (`cargo xtask lab rdma`) reserves some, and runs these cases.

use sterna::Direct;
use sterna::sandbox::Feature;

use crate::calls::{Case, Fault, check};
use crate::child::{is_child, skipped};
use crate::scenes::{Place, Scene};

fn cases() -> Vec<Case> {
    let scene = |name, place| Scene::new(name, place).huge();
    vec![
        Case::plain(scene("huge", Place::Tcp)),
        Case::plain(scene("huge-multifd", Place::Tcp).multifd()),
        Case::plain(scene("huge-mapped", Place::File).mapped(Direct::Off)),
        Case::plain(scene("huge-postcopy", Place::Tcp).postcopy()),
        Case::plain(scene("huge-postcopy-multifd", Place::Tcp).postcopy().multifd()),
        Case::plain(scene("huge-same-host", Place::Unix).same_host()),
        Case {
            fault: Fault::DestinationEnds,
            ..Case::plain(scene("huge-destination-ends", Place::Tcp).limited())
        },
    ]
}

/// Free huge pages of 2 MiB.
fn free_pages() -> u32 {
    let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

#[test]
fn huge_pages_make_exactly_the_calls_of_the_table() {
    if free_pages() < 16 {
        return skipped(
            "huge_pages_make_exactly_the_calls_of_the_table",
            "fewer than 16 huge pages of 2 MiB are free",
        );
    }
    if is_child() {
        check(&cases(), |call| call.feature == Feature::HugePages);
    }
}
