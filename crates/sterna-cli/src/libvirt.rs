//! Domains of libvirt on the command line: what commands say about them, and which commands libvirt does itself.

use std::path::Path;

use sterna_drive::MonitorAddress;
use sterna_image::Preview;
use sterna_libvirt::DomainAddress;

use crate::exit::Stop;

/// Help text for commands that accept a domain of libvirt.
pub const HELP: &str = "\
Domains of libvirt: libvirt:NAME, or libvirt+URI:NAME such as libvirt+qemu:///session:web1. The URI is LIBVIRT_DEFAULT_URI or \
qemu:///system by default. The first such command taints the domain until its QEMU ends (`custom monitor control commands` \
in `virsh dominfo`), because libvirt marks every domain whose monitor another program uses. A QEMU 11.1 or later gets a \
monitor of its own during the command.";

/// The refusal of `sterna migrate` for `domain`, with the command that migrates it. `destination` is the migration's address.
pub fn migrate(domain: &DomainAddress, destination: &str, is_postcopy: bool) -> Stop {
    let (migrate_uri, connection) = match destination.split_once(':') {
        Some(("tcp", place)) => {
            let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
            (format!("tcp://{place}"), format!("qemu+ssh://{host}/system"))
        }
        Some(("unix", path)) => (format!("unix://{path}"), "qemu+ssh://DESTINATION/system".to_owned()),
        Some(("rdma", place)) => {
            let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
            (format!("rdma://{place}"), format!("qemu+ssh://{host}/system"))
        }
        _ => (String::new(), "qemu+ssh://DESTINATION/system".to_owned()),
    };
    let mut options = "--live".to_owned();
    if is_postcopy {
        options += " --postcopy --postcopy-after-precopy";
    }
    if !migrate_uri.is_empty() {
        options += &format!(" --migrateuri {migrate_uri}");
    }
    let command = domain.virsh(&format!("migrate {options} {} {connection}", domain.quoted_name()));
    Stop::usage(format!(
        "libvirt migrates its domains itself, because it must move the definition, the disks and the locks, too: \
         `{command}`. Over a network that breaks, give it the socket of a `sterna relay` with --migrateuri"
    ))
}

/// The refusal of `sterna cancel` for `domain`.
pub fn cancel(domain: &DomainAddress) -> Stop {
    let command = domain.virsh(&format!("domjobabort {}", domain.quoted_name()));
    Stop::usage(format!("libvirt cancels the migrations that it has started: `{command}`"))
}

/// The refusal of `sterna restore` into `domain`, with the commands that restore `image`.
pub fn restore(domain: &DomainAddress, image: &Path) -> Stop {
    let quoted = format!("'{}'", image.display().to_string().replace('\'', r"'\''"));
    let is_libvirts = Preview::open(image).is_ok_and(|image| image.format.is_libvirt());
    let how = if is_libvirts {
        format!("`{}`", domain.virsh(&format!("restore {quoted}")))
    } else {
        let restore = domain.virsh("restore OUT");
        let xml = domain.virsh(&format!("dumpxml --migratable --inactive {}", domain.quoted_name()));
        format!(
            "it reads only its own formats, so first convert the image with `{xml} > XML` and `sterna convert {quoted} OUT \
             --format libvirt-raw --xml XML`, and then `{restore}`"
        )
    };
    Stop::usage(format!("libvirt starts the QEMU that loads an image: {how}"))
}

/// The command that resumes a stopped guest at `address`, in backquotes.
pub fn resume(address: &MonitorAddress) -> String {
    match address.domain() {
        Some(domain) => format!("`{}`", domain.virsh(&format!("resume {}", domain.quoted_name()))),
        None => "`cont`".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain() -> DomainAddress {
        "libvirt+qemu:///system:web1".parse().unwrap()
    }

    #[test]
    fn migrate_names_the_virsh_command_with_this_address() {
        let said = |to: &str, is_postcopy| migrate(&domain(), to, is_postcopy).message;

        assert!(said("tcp:dst:4444", false).contains(
            "`virsh -c qemu:///system migrate --live --migrateuri tcp://dst:4444 web1 qemu+ssh://dst/system`"
        ));
        assert!(said("unix:/run/mig/web1.sock", true).contains(
            "migrate --live --postcopy --postcopy-after-precopy --migrateuri unix:///run/mig/web1.sock web1 "
        ));
        assert!(said("tcp:[::1]:4444", false).contains("qemu+ssh://[::1]/system"));
    }

    #[test]
    fn restore_of_another_format_names_the_conversion() {
        let said = restore(&domain(), Path::new("/no/image")).message;

        assert!(said.contains("dumpxml --migratable --inactive web1 > XML"), "{said}");
        assert!(said.contains("sterna convert '/no/image' OUT"), "{said}");
    }

    #[test]
    fn resume_of_a_domain_is_virshs() {
        assert_eq!(resume(&MonitorAddress::Domain(domain())), "`virsh -c qemu:///system resume web1`");
    }
}
