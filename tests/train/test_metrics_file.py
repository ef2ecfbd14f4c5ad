from qat.train.metrics_file import MetricsFile, read_metrics


def test_one_row_a_step_and_a_column_a_metric(tmp_path):
    logger = MetricsFile(tmp_path / "metrics.csv")
    logger.log_metrics({"lr": 0.1}, step=0)
    logger.log_metrics({"train_loss": 2.0}, step=0)
    logger.log_metrics({"val_acc": 0.5}, step=9)
    logger.save()
    assert (tmp_path / "metrics.csv").read_text() == "step,lr,train_loss,val_acc\n0,0.1,2.0,\n9,,,0.5\n"
    assert read_metrics(tmp_path / "metrics.csv") == [{"step": 0, "lr": 0.1, "train_loss": 2.0}, {"step": 9, "val_acc": 0.5}]


def test_a_resumed_run_takes_over_the_rows_before_its_checkpoint(tmp_path):
    first = MetricsFile(tmp_path / "old.csv")
    for step in range(6):
        first.log_metrics({"val_acc": step / 10}, step=step)
    second = MetricsFile(tmp_path / "new.csv", tmp_path / "old.csv", until=4)
    second.log_metrics({"val_acc": 0.9}, step=4)
    second.save()
    assert [row["step"] for row in read_metrics(tmp_path / "new.csv")] == [0, 1, 2, 3, 4]


def test_no_file_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.csv") == []
