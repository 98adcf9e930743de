//! VERSION.

use std::os::fd::AsFd;

use outboard_vfio_user::wire::{CommandCode, TwinSocket, Version};
use serde_json::{Map, Value};

use super::client::{Client, by_messages, memory};
use super::{Check, Checked, EINVAL, Stop, Subject, alive, holds, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 15,
        title: "nothing is done before VERSION",
        text: "libvfio-user: EINVAL, or the connection ends",
        run: first_command,
    },
    Check {
        point: 16,
        title: "another major version is refused; the lesser minor version is agreed on",
        text: "specification, \"VFIO_USER_VERSION\"; QEMU takes minor 0 only",
        run: numbers,
    },
    Check {
        point: 17,
        title: "capabilities may be left out at every level",
        text: "specification, \"Version Data\"; SPDK sends none",
        run: absent_capabilities,
    },
    Check {
        point: 18,
        title: "capabilities that cannot be read are refused, and cost nobody else anything",
        text: "libvfio-user test_negotiate",
        run: malformed_capabilities,
    },
    Check {
        point: 19,
        title: "the reply is one that every client takes",
        text: "QEMU's buffer of 193 characters and its limits; rust-vmm wants the capabilities object",
        run: reply_for_all,
    },
    Check {
        point: 20,
        title: "a twin socket only for a client that asks and takes a descriptor",
        text: "specification, \"Version Data\"",
        run: twin_socket,
    },
    Check { point: 21, title: "a second VERSION changes nothing", text: "ours: EINVAL", run: second_version },
];

fn body(major: u16, minor: u16, json: &str) -> Vec<u8> {
    [&major.to_le_bytes()[..], &minor.to_le_bytes(), json.as_bytes()].concat()
}

/// Opens with a VERSION that is to be refused or to end the connection.
fn refuses(subject: &Subject<'_>, code: CommandCode, body: &[u8]) -> Checked {
    let mut client = subject.connect()?;
    match client.call_raw(code, body, &[]) {
        Err(Stop::Refused { .. }) => {}
        // An end without a word is as good.
        Err(_) if client.has_ended() => return alive(&mut subject.open()?),
        Err(other) => return Err(other),
        Ok(_) => return client.wrong("EINVAL or the end of the connection", "success"),
    }
    drop(client);
    alive(&mut subject.open()?)
}

fn first_command(subject: &Subject<'_>) -> Checked {
    [2, 3, 4, 5, 7, 8, 9, 10, 13, 999]
        .into_iter()
        .try_for_each(|code| refuses(subject, CommandCode(code), &[0; 32]))
}

fn numbers(subject: &Subject<'_>) -> Checked {
    for major in [1, u16::MAX] {
        refuses(subject, CommandCode::VERSION, &body(major, 0, "{}\0"))?;
    }
    let ours = negotiate(subject, u16::MAX, "")?.1;
    for minor in 0..=3 {
        same(format!("VERSION 0.{minor}"), negotiate(subject, minor, "{}\0")?.1, minor.min(ours))?;
    }
    Ok(())
}

/// A client past a VERSION of its own making, the minor version that came back, and the capabilities.
fn negotiate(subject: &Subject<'_>, minor: u16, json: &str) -> Checked<(Client, u16, Map<String, Value>)> {
    let mut client = subject.connect()?;
    let reply = client.call_raw(CommandCode::VERSION, &body(0, minor, json), &[])?;
    let [a, b, c, d, text @ ..] = reply.body.as_slice() else {
        return client.wrong("a version", format!("{} bytes", reply.body.len()));
    };
    if (*a, *b) != (0, 0) {
        return client.wrong("major version 0", format!("{:02x?}", &reply.body[..4]));
    }
    let minor = u16::from_le_bytes([*c, *d]);
    let Some((0, text)) = text.split_last() else {
        return client.wrong("capabilities that end in a NUL", format!("{text:02x?}"));
    };
    let capabilities = serde_json::from_slice(text).ok().and_then(|mut document: Map<String, Value>| {
        document.remove("capabilities").and_then(|capabilities| capabilities.as_object().cloned())
    });
    match capabilities {
        Some(capabilities) => Ok((client, minor, capabilities)),
        None => client.wrong("an object with an object \"capabilities\"", String::from_utf8_lossy(text)),
    }
}

fn absent_capabilities(subject: &Subject<'_>) -> Checked {
    for json in ["", "{}\0", "{\"capabilities\":{}}\0", "{\"capabilities\":{\"new\":[1]},\"x\":0}\0"] {
        alive(&mut negotiate(subject, 1, json)?.0)?;
    }
    Ok(())
}

fn malformed_capabilities(subject: &Subject<'_>) -> Checked {
    let capability = |text: &str| format!("{{\"capabilities\":{{{text}}}}}\0");
    let deep = format!("{}{}\0", "[".repeat(10_000), "]".repeat(10_000));
    let mut bad: Vec<Vec<u8>> = [
        "{}",
        "{\"capabilities\":\0",
        "\0",
        "[]\0",
        "{\"capabilities\":[]}\0",
        &capability("\"max_msg_fds\":-1"),
        &capability("\"max_msg_fds\":1e99"),
        &capability("\"max_msg_fds\":\"8\""),
        &capability("\"max_msg_fds\":5000"),
        &capability("\"max_data_xfer_size\":0"),
        &capability("\"max_data_xfer_size\":-1"),
        &capability("\"max_data_xfer_size\":{}"),
        &deep,
    ]
    .map(|json| body(0, 1, json))
    .to_vec();
    bad.extend([vec![], vec![0, 0], vec![0, 0, 1]]);
    for body in bad {
        refuses(subject, CommandCode::VERSION, &body)?;
    }
    // A megabyte may be taken or refused; it must not hurt.
    let long = format!("{{\"capabilities\":{{}}}}{}\0", " ".repeat((1 << 20) - 100));
    let mut client = subject.connect()?;
    match client.call_raw(CommandCode::VERSION, &body(0, 1, &long), &[]) {
        Ok(_) | Err(Stop::Refused { .. }) => {}
        Err(_) if client.has_ended() => {}
        Err(other) => return Err(other),
    }
    drop(client);
    // Nor a descriptor.
    let file = memory(1);
    let mut client = subject.connect()?;
    let result = client.call_raw(CommandCode::VERSION, &body(0, 1, "{}\0"), &[file.as_fd()]);
    refused(result, "VERSION with a descriptor", &[EINVAL])?;
    drop(client);
    alive(&mut subject.open()?)
}

/// What QEMU sends, in 193 characters.
const QEMU: &str = "{\"capabilities\": {\"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \"pgsizes\": 4096, \
     \"max_dma_maps\": 65535, \"migration\": {\"pgsize\": 4096, \"max_bitmap_size\": 268435456}, \
     \"write_multiple\": true}}\0";

fn reply_for_all(subject: &Subject<'_>) -> Checked {
    for json in [QEMU, "", "{}\0"] {
        let (mut client, minor, capabilities) = negotiate(subject, 0, json)?;
        same("VERSION as QEMU has it", minor, 0)?;
        let length = serde_json::to_string(&Value::Object(capabilities.clone())).map_or(0, |text| text.len());
        holds(length <= 193 - 20, "VERSION as QEMU has it", "at most 193 characters", length)?;
        let value = |key: &str| capabilities.get(key).map(|value| value.as_u64().unwrap_or(u64::MAX));
        let within = |key: &str, fits: fn(u64) -> bool| {
            holds(
                value(key).is_none_or(fits),
                "VERSION as QEMU has it",
                &format!("{key} as QEMU takes it"),
                value(key),
            )
        };
        within("max_msg_fds", |count| count <= 16)?;
        within("max_data_xfer_size", |size| size <= 64 << 20 && size > 0)?;
        within("max_dma_maps", |count| count <= 65535)?;
        within("pgsizes", |sizes| sizes > 0 && sizes % 4096 == 0)?;
        alive(&mut client)?;
    }
    Ok(())
}

fn twin_socket(subject: &Subject<'_>) -> Checked {
    let silent = negotiate(subject, 1, "{\"capabilities\":{\"max_msg_fds\":8}}\0")?.2;
    holds(!silent.contains_key("twin_socket"), "VERSION without twin_socket", "none", &silent)?;
    let mut version = Version::proposal();
    version.capabilities.twin_socket = Some(TwinSocket { supported: true, fd_index: None });
    for count in [0, 8] {
        version.capabilities.max_msg_fds = Some(count);
        let mut client = subject.connect()?;
        let reply = client.call(&outboard_vfio_user::wire::Command::Version(version.clone()), &[])?;
        let text = String::from_utf8_lossy(reply.body.get(4..).unwrap_or_default()).into_owned();
        let offered = text.contains("\"twin_socket\"") && text.contains("true") && count > 0;
        let descriptors = reply.descriptors.len();
        holds(
            descriptors == usize::from(offered),
            &format!("VERSION with twin_socket, taking {count} descriptors"),
            "a socket if one is offered, and none else",
            (text, descriptors),
        )?;
        alive(&mut client)?;
    }
    Ok(())
}

fn second_version(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    client.map(&by_messages(0, 0x1000), None)?;
    let again = client.call_raw(CommandCode::VERSION, &body(0, 1, "{}\0"), &[]);
    refused(again, "a second VERSION", &[EINVAL])?;
    client.unmap(0, 0x1000)?;
    alive(&mut client)
}
