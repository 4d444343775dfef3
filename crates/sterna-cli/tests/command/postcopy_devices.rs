//! A guest with a network card and a copied disk continues in postcopy. The test observes its packets, its
//! console and its disk.

use sterna::ram::missing_pages::MissingPages;
use sterna_guests::ledger;

use crate::protect_devices::{Ear, disk, in_own_network, lines, run, skip};
use crate::support::protection::{Site, sterna, wait};

/// Over multifd channels, and over the main channel alone.
const WAYS: [&[&str]; 2] = [&["--cap=multifd", "--set=multifd-channels=3"], &[]];

#[test]
fn disk_that_is_copied_and_card_go_on_in_postcopy_and_no_packet_is_lost() {
    const TEST: &str = "disk_that_is_copied_and_card_go_on_in_postcopy_and_no_packet_is_lost";
    if let Err(error) = MissingPages::probe() {
        return skip(TEST, error);
    }
    in_own_network(TEST, || {
        for more in WAYS {
            let site = Site::new();
            let mut ear = Ear::new();
            let _source = run(&site, "a", &["-S"]);
            let _destination = run(&site, "b", &["--incoming=defer"]);
            let _ = site.ask("a", "cont");
            wait("a whole disk", || lines(&site, "a").len() > ledger::SLOTS as usize);

            let mut migrate = sterna();
            migrate.arg("migrate").arg(site.socket("a"));
            migrate.arg(format!("unix:{}", site.path("to-b").display()));
            migrate.arg("--dest-qmp").arg(site.socket("b")).args(["--postcopy=0", "--set=downtime-limit=0"]);
            let migrated = migrate.args(more).output().unwrap();
            assert!(migrated.status.success(), "{migrated:?}");
            let report = String::from_utf8_lossy(&migrated.stdout);
            assert!(report.contains("last page sent"), "it went on in postcopy: {report}");

            // The guest rewrites its whole disk, and checks the old content before each write.
            wait("the guest, there", || lines(&site, "b").len() > 3 * ledger::SLOTS as usize);
            let _ = site.ask("b", "stop");
            let (heard, announcements) = ear.heard();
            assert!(heard.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
            assert!(heard[0] == 1 && announcements >= 1, "{} {announcements}", heard[0]);
            let (here, there) = (lines(&site, "a"), lines(&site, "b"));
            let (last, first) = (*here.last().unwrap(), there[0]);
            assert!((last + 1..=last + 2).contains(&first), "{first} after {last}");
            assert!(there.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            let (on_disk, printed) =
                (ledger::last_on_disk(&disk(&site, "b")).unwrap(), *there.last().unwrap());
            assert!((printed..=printed + 2).contains(&on_disk), "{on_disk} on the disk, {printed} printed");
        }
    });
}
